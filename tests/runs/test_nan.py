"""Losses and gradients that are not finite: skipped by all ranks, recorded, and never the best."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import PipelineError
from pipeline.store.compare import first_difference, read_any
from tests.support.experiments import FILES, write_experiment
from tests.support.running import environment, run_inside, run_process

ROOT = Path(__file__).parents[2]
DATA = Path("experiment_results/tiny/data")
_TRANSFORM = FILES["pymodules/module_transforms/a.py"]


def spoil(expression: str, condition: str) -> dict[str, str | None]:
    """Return a module transform whose loss is replaced by ``expression`` under a condition."""
    text = _TRANSFORM.replace(
        "return {self.register: difference**2,", "return {self.register: self.loss(difference, batch, modules),"
    )
    method = f"""
            def loss(self, difference, batch, modules):
                loss = difference**2
                training = modules["trunk"].training
                return {expression} if {condition} else loss
    """
    return {
        "pymodules/module_transforms/a.py": text.replace('register = "loss_a"\n', 'register = "loss_a"\n' + method, 1)
    }


def skipped(home: Path) -> list[bool]:
    files = sorted((home / DATA / "loss_reg_data/train/loss_a").glob("step_data_*.npz"))
    return [bool(value) for path in files for value in read_any(path)["skipped"]]


@pytest.mark.parametrize(
    "expression", ["loss * float('nan')", "loss / 0.0", "(loss * 0).sqrt()", "loss + float('inf')"]
)
def test_bad_step_is_skipped_and_recorded(home: Path, expression: str) -> None:
    """A loss or a gradient that is not finite skips its step, and only that one; training goes on."""
    write_experiment(home, files=spoil(expression, "training and 7 in batch['idx'] and self.register == 'loss_a'"))
    assert run_inside(home).is_finished
    assert sum(skipped(home)) == 3
    values = read_any(home / DATA / "loss_reg_data/train/loss_a/epoch_data.npz")
    assert np.isfinite(values["means"]).all()
    assert values["items"].tolist() != [40, 40, 40]
    for path in (home / DATA / "module_ckps/last").glob("*.pt"):
        assert all(tensor.isfinite().all() for tensor in read_any(path).values())


def test_bad_validation_is_never_the_best(home: Path) -> None:
    """Values that are not finite in validation are recorded, and no epoch becomes the best by them."""
    write_experiment(home, files=spoil("loss * float('nan')", "not training and self.register == 'loss_a'"))
    assert run_inside(home).is_finished
    assert np.isnan(read_any(home / DATA / "loss_reg_data/val/loss_a/epoch_data.npz")["means"]).all()
    assert not (home / DATA / "module_ckps/best").exists()


def test_recorded_value_that_is_not_finite_skips_nothing(home: Path) -> None:
    """Only what is optimised can spoil a step; a metric may be undefined for a batch."""
    text = _TRANSFORM.replace("difference.detach().abs()", "difference.detach() * float('nan')")
    write_experiment(home, files={"pymodules/module_transforms/a.py": text})
    assert run_inside(home).is_finished
    assert not any(skipped(home))


def test_too_many_bad_steps_in_a_row_abort(home: Path) -> None:
    """More bad steps in a row than allowed end the run with what to do; the last commit is intact."""
    write_experiment(home, files=spoil("loss * float('nan')", "training"), training={"max_consecutive_nan_steps": 3})
    with pytest.raises(
        PipelineError, match=r"(?s)4 steps in a row.*epoch 1, step 4.*max_consecutive_nan_steps: 3.*fix:"
    ) as raised:
        run_inside(home, "--set", "training.grad_clip_norm=4")
    assert (home / DATA / "module_ckps/last/trunk.pt").exists()
    log = (home / "experiment_logs/tiny/train.log").read_text()
    assert (log.count("skipped on all ranks"), log.count("To look at it: ")) == (4, 1)
    # Each of the three ways out works as it is printed, with what the experiment was started with.
    continuing, new, reset = (line.strip() for line in str(raised.value).splitlines() if "tiny" in line)
    assert continuing.endswith("--resume --detect-anomaly")
    assert reset.endswith("--reset --set training.grad_clip_norm=4")
    assert paste(new).returncode == 0
    assert paste(f"{reset} --stop-after-epoch 0").returncode == 0
    assert "the gradient of this operation is nan" in paste(continuing).stderr


def test_anomaly_is_one_message_that_names_the_line(home: Path) -> None:
    """Autograd's own two tracebacks are in the log; the screen has the forward line, the batch and the way on."""
    condition = "training and 7 in batch['idx'] and self.register == 'loss_a'"
    write_experiment(home, files=spoil("(loss * 0).sqrt()", condition))
    done = run_process(home, "--detect-anomaly")
    assert done.returncode == 1
    message = done.stderr.split("rank 0 failed:\n")[1].splitlines()
    assert len(message) == 4, done.stderr
    place = home / "experiment_settings/tiny/pymodules/module_transforms/a.py"
    number = 1 + place.read_text().splitlines().index(next(x for x in place.read_text().splitlines() if "sqrt" in x))
    assert message[0].startswith(f"{place}:{number}: the gradient of this operation is nan (")
    assert re.search(r"in epoch 1, step 1, a batch of dataset a \(points [\d, ]*\b7\b.*\): return .*sqrt", message[0])
    assert message[1].startswith("  fix: repair it in ")
    assert "Error detected in" not in done.stderr + done.stdout
    log = (home / "experiment_logs/tiny/train.log").read_text()
    assert "Traceback of forward call that caused the error" in log
    assert "returned nan values" in log


def paste(command: str) -> subprocess.CompletedProcess[str]:
    """Run a printed command as a shell does."""
    return subprocess.run(command, shell=True, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_all_ranks_skip_what_one_rank_met(tmp_path: Path) -> None:
    """A bad batch on one of two processes skips the same steps as in a single process, also across a resume."""
    files = spoil("loss * float('nan')", "training and 7 in batch['idx'] and self.register == 'loss_a'")
    for name in ("tiny", "parts"):
        write_experiment(tmp_path, name, files=files)
    assert run_process(tmp_path, nproc=2).returncode == 0
    assert run_process(tmp_path, "--stop-after-epoch", "1", name="parts", nproc=2).returncode == 0
    assert run_process(tmp_path, "--resume", name="parts", nproc=2).returncode == 0
    assert sum(skipped(tmp_path)) == 3
    assert first_difference(tmp_path / DATA, tmp_path / "experiment_results/parts/data") is None


@pytest.mark.slow
def test_skipped_step_is_explained_once_with_the_command_that_rebuilds_it(home: Path) -> None:
    """Of two ranks one speaks: register, dataset, points and the replay line, which works as printed."""
    write_experiment(
        home, files=spoil("loss * float('nan')", "training and 7 in batch['idx'] and self.head == 'head_b'")
    )
    done = run_process(home, "--stop-after-epoch", "1", nproc=2)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in (done.stdout + done.stderr).splitlines() if "skipped on all ranks" in line]
    words = r"skipped on all ranks: loss_b is not finite in a batch of dataset b \(points (.*)\)"
    found = re.search(words, line)
    assert found
    assert "7" in found[1].split(", ")
    command = line.split("To look at it: ")[1]
    replayed = paste(command)
    assert "identical to the record" in replayed.stdout, replayed.stdout + replayed.stderr


def test_gradient_that_is_not_finite_is_called_one(home: Path) -> None:
    """A loss may be finite while its gradient is not."""
    condition = "training and 7 in batch['idx'] and self.register == 'loss_a'"
    write_experiment(home, files=spoil("(loss * 0).sqrt()", condition))
    done = run_process(home, "--stop-after-epoch", "1")
    assert "skipped on all ranks: a gradient is not finite. To look at it: " in done.stdout + done.stderr
