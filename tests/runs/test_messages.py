"""What a person reads when something is wrong, under torchrun with two processes: once, where, and what to do."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from pipeline.command_lines import run_line, verb_line
from tests.runs.test_stopping import step_of
from tests.support.experiments import FILES, tree, write_experiment
from tests.support.running import BackgroundRun, run_inside, run_process
from tests.support.verbs import call

_TORCHRUN = 'Traceback (most recent call last):\n  File "<frozen runpy>"'
_HEADS = FILES["pymodules/optim_sched/heads.py"]
_TRUNK = FILES["pymodules/modules/trunk.py"]
_TRANSFORM = FILES["pymodules/module_transforms/a.py"]
BAR = {"progress_bar": {"enabled": True}}


def check_refused(home: Path, *words: str, code: int, said: list[str], name: str = "tiny", **env: str) -> None:
    """Run under torchrun: one message with all that must be said, no stack trace, nothing written."""
    before = tree(home)
    done = run_process(home, *words, name=name, nproc=2, env=env)
    told, _, table = done.stderr.partition(_TORCHRUN)
    assert done.returncode == 1
    assert {words: told.count(words) for words in said} == dict.fromkeys(said, 1)
    assert "Traceback" not in told
    assert f"exitcode  : {code} " in table
    assert tree(home) == before


def hide(home: Path, text: str) -> str:
    """Return a search path from which every Python process of a run executes ``text`` first."""
    (home / "hidden").mkdir()
    (home / "hidden" / "sitecustomize.py").write_text(text)
    return str(home / "hidden")


def test_all_that_is_wrong_with_an_experiment_is_listed_at_once(home: Path) -> None:
    """Broken JSON, keys, types, ranges, missing files, imports, names and signatures stand in one list."""
    files: dict[str, str | None] = {
        "settings/data_loading.json": '{\n  "step_min_items": 14,\n}\n',
        "settings/loss_registers.json": '{"loss_register": []}',
        "pymodules/modules/trunk.py": "import nowhere\n",
        "pymodules/modules/head_a.py": "modul = 3\nsettings = {}\n",
        "pymodules/optim_sched/heads.py": "def create_optimizer():\n    pass\n",
        "pymodules/loss_weighter.py": "loss_weigher = 3\n",
    }
    write_experiment(home, "wrong", files=files, training={"sed": 1, "seed": -1, "precision": 8})
    place = f"{home}/experiment_settings/wrong"
    said = [
        f"{place}/settings/data_loading.json:3:1: Expected a key in double quotes (a comma before a closing bracket",
        f"{place}/settings/loss_registers.json:1 (loss_register): unknown key 'loss_register'",
        f"{place}/settings/training.json:5 (sed): unknown key 'sed'",
        "Did you mean 'seed'?",
        f"{place}/settings/training.json:2 (seed): must be 0 or more, but is -1 instead",
        '(precision): must be one of ["fp32", "bf16", "fp16"], but is 8 instead',
        f"{place}/pymodules/modules/trunk.py:1: must be importable, but raises ModuleNotFoundError",
        "fix: pip install nowhere",
        "head_a.py: module is not defined. Did you mean 'modul'?",
        "heads.py:1: create_optimizer must be a function create_optimizer(modules), but is create_optimizer()",
        "loss_weighter.py: loss_weighter is not defined. Did you mean 'loss_weigher'?",
    ]
    check_refused(home, name="wrong", code=2, said=said)


def test_unfinished_results_are_told_with_both_commands(home: Path) -> None:
    """Where it stands, and the lines that continue it or start it again, with the same number of processes."""
    run_inside(home, "--stop-after-epoch", "1")
    line = run_line("tiny", home, num_processes=2)
    said = ["it stands at epoch 2, training, step 0.", f"continue:    {line} --resume", f"again: {line} --reset"]
    check_refused(home, code=3, said=said)


def test_crash_of_all_processes_is_told_once_with_what_to_do(home: Path) -> None:
    """Both processes run out of memory: the batch and the remedy stand there once, the log has the traceback."""
    boom = 'raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")\n                outputs = modules'
    files: dict[str, str | None] = {
        "pymodules/module_transforms/a.py": _TRANSFORM.replace("outputs = modules", boom, 1),
    }
    write_experiment(home, files=files, logging=BAR)
    done = run_process(home, nproc=2)
    told = done.stderr.partition(_TORCHRUN)[0]
    assert done.returncode == 1
    assert told.count("Out of memory on cpu in a batch of dataset") == 1
    assert told.count("fix: lower batch_size in pymodules/dataloaders/") == 1
    assert "pipeline/training" not in told
    assert "pipeline/training" in (home / "experiment_logs/tiny/train.log").read_text()
    assert not re.search("\r|\x1b", done.stdout + done.stderr)
    assert call(home, "status", "tiny", "--exit-code") == 5


@pytest.mark.slow
def test_names_and_parameters_that_do_not_fit_are_told_with_both_places(home: Path) -> None:
    """A name without its counterpart is told with the names there are."""
    files: dict[str, str | None] = {
        "pymodules/dataloaders/b.py": None,
        "pymodules/dataloaders/bb.py": FILES["pymodules/dataloaders/b.py"],
        "pymodules/module_transforms/b.py": FILES["pymodules/module_transforms/b.py"].replace("loss_b", "los_b"),
    }
    write_experiment(home, "wrong", files=files)
    said = [
        "dataloaders/bb.py: must be named like a dataset, but there are a, b. Did you mean 'b'?",
        "module_transforms/b.py:3: loss_registers has 'los_b', but there are error, loss_a, loss_b. Did",
        "loss_registers.json:4: register 'loss_b' is fed by no module transform",
    ]
    check_refused(home, name="wrong", code=2, said=said)
    write_experiment(home, "other", files={"pymodules/optim_sched/heads.py": _HEADS.replace('"head_b"', '"stem"')})
    said = [
        "head_b.py:3: every parameter must be in exactly one optimizer, but 'weight', 'bias' are in none",
        "stem.py:3: frozen parameters must be in no optimizer, but '0.weight', '0.bias', '1.weight'",
    ]
    check_refused(home, name="other", code=2, said=said)


@pytest.mark.slow
def test_names_of_experiments_and_settings_are_suggested(home: Path) -> None:
    """Without an experiment, with an unknown one, or with a bad --set, what there is and the nearest are told."""
    check_refused(
        home, name="tinny", code=2, said=["there are tiny. Did you mean 'tiny'?", "training_pipeline.py tiny "]
    )
    check_refused(home, "--set", "training.sed=1", code=2, said=["unknown key 'sed'; available are", "mean 'seed'?"])
    said = ["--set works only when an experiment starts", "new VARIANT --from tiny --set training.seed=1"]
    check_refused(home, "--resume", "--set", "training.seed=1", code=2, said=said)
    done = run_process(home.parent, name="--auto", nproc=2, env={"GORIDEEPSTYLE_DATA_HOME": str(home)})
    assert done.stderr.count("an experiment must be named") == 1


@pytest.mark.slow
def test_weights_that_do_not_fit_are_listed(home: Path) -> None:
    """Missing, unexpected and differing keys: the first ten of each, and how many there are."""
    (home / "module_ckps").mkdir()
    weights = {f"x.{number:02}": torch.zeros(1) for number in range(14)}
    torch.save({**weights, "0.weight": torch.zeros(3, 3)}, home / "module_ckps" / "old.pt")
    source = '{"load_weights_from_ckp": {"ckp_name": "old"}}'
    write_experiment(home, files={"pymodules/modules/trunk.py": _TRUNK.replace('{"frozen": False}', source)})
    said = [
        "missing (5) 1.bias",
        "unexpected (14) x.00, x.01",
        "x.09 and 4 more",
        "differing shapes (1) 0.weight (3, 3) instead of (8, 6)",
        "fix: rename keys with strip_prefix or key_map",
    ]
    check_refused(home, code=2, said=said)


@pytest.mark.slow
def test_live_run_is_told_with_its_owner(home: Path) -> None:
    """Host, process, scheduler job and start of the run that holds the experiment, and how to look at or stop it."""
    text = FILES["pymodules/early_stopper.py"].replace("max_epochs=3", "max_epochs=5000")
    write_experiment(home, files={"pymodules/early_stopper.py": text})
    with BackgroundRun(home, nproc=2, env={"SLURM_JOB_ID": "77"}) as run:
        run.wait_for(lambda: step_of(home)[0] >= 1)
        owner = json.loads((home / "experiment_results/tiny/run.lock").read_text())
        done = run_process(home, "--resume", nproc=2)
        assert run.process.poll() is None
    who = f"held by pid {owner['pid']} on host {owner['host']}, job 77, since {owner['started']}."
    assert done.stderr.count(who) == 1
    assert verb_line("stop", "tiny", home) in done.stderr
    assert "exitcode  : 3 " in done.stderr


@pytest.mark.slow
def test_other_surroundings_are_told_once_and_do_not_stop_a_resume(home: Path) -> None:
    """Edited settings, another version of torch and another world size: what differs, what it means; then finished."""
    run_inside(home, "--stop-after-epoch", "1")
    starts = home / "experiment_results/tiny/starts.jsonl"
    starts.write_text(json.dumps({**json.loads(starts.read_text()), "torch": "1.0"}) + "\n")
    (home / "experiment_settings/tiny/settings/training.json").write_text('{"seed": 99}')
    done = run_process(home, "--resume", nproc=2)
    assert done.returncode == 0
    assert done.stdout.count("the run continues with its frozen copy: settings/training.json. To use the changes") == 1
    changes = f"Changed since the last start: world_size 1 → 2, backend none → gloo, torch 1.0 → {torch.__version__}"
    assert done.stdout.count(changes) == 1
    assert "from epoch 2, step 1 on, bits may differ from those of an uninterrupted run, by rounding" in done.stdout
    again = run_process(home, "--resume", nproc=2)
    assert again.returncode == 0
    assert again.stdout.count("finished on") == again.stdout.count("Best: epoch") == 1
    assert f"new VARIANT --from tiny --data-home {home}" in again.stdout


@pytest.mark.slow
def test_more_processes_than_gpus_are_refused(home: Path) -> None:
    """Two processes that see one and the same GPU are refused with both numbers and the variable that decides."""
    text = """
from types import SimpleNamespace

import torch

torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
torch.accelerator.device_count = lambda: 1
torch.accelerator.set_device_index = lambda device: None
torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid="GPU-1")
"""
    said = ["2 processes on this machine need 2 accelerators, but 1 can be seen; CUDA_VISIBLE_DEVICES is '3'."]
    check_refused(home, code=2, said=said, PYTHONPATH=hide(home, text), CUDA_VISIBLE_DEVICES="3")


@pytest.mark.slow
def test_extra_that_is_not_installed_is_refused_before_training(home: Path) -> None:
    """The file that asks for it and the pip line are told."""
    write_experiment(home, logging={"tensorboard": {"enabled": True}})
    path = hide(home, 'import sys\n\nsys.modules["tensorboard"] = None\n')
    said = ["settings/logging.json: tensorboard.enabled is true", "fix: pip install 'training-pipeline[tensorboard]'"]
    check_refused(home, code=2, said=said, PYTHONPATH=path)


@pytest.mark.slow
def test_wrong_losses_and_too_many_bad_steps_are_told_once(home: Path) -> None:
    """What every process finds at the same moment in mid-run is one message, without a stack trace; the log has it."""
    wrong = {
        "mean": ("difference**2,", "(difference**2).mean(),", "must return one value per item for 'loss_"),
        "nan": ("difference**2,", "difference**2 * float('nan'),", "training.json allows max_consecutive_nan_steps: 2"),
    }
    for name, (old, new, said) in wrong.items():
        files: dict[str, str | None] = {"pymodules/module_transforms/a.py": _TRANSFORM.replace(old, new)}
        write_experiment(home, name, files=files, training={"max_consecutive_nan_steps": 2})
        done = run_process(home, name=name, nproc=2)
        told = done.stderr.partition(_TORCHRUN)[0]
        assert done.returncode == 1
        assert told.count(said) == 1
        assert "Traceback" not in told
        assert "Traceback" in (home / "experiment_logs" / name / "train.log").read_text()
