"""Exceptions in an author's own code: told with the author's frames, state intact, resumable after the fix."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from pipeline.store.compare import first_difference
from tests.crash.experiment import EXPERIMENT
from tests.support.experiments import FILES, write_experiment
from tests.support.running import BackgroundRun, run_inside, run_process, send

RESULTS = "experiment_results/tiny"
# Each fails in the second epoch or later, when a commit exists, and only while the file "broken" is there.
_BOOM = 'import pathlib\nif pathlib.Path("{home}/broken").exists():\n    raise ValueError("boom")\n'
PLACES = {
    "dataset": ("pymodules/utils/points.py", 'return {"x": self.inputs[idx].copy()'),
    "transform": ("pymodules/utils/points.py", "noise = random.gauss"),
    "module transform": ("pymodules/module_transforms/a.py", "outputs = modules"),
}


def broken(home: Path, file: str, before: str) -> dict[str, str | None]:
    text = FILES[file]
    line = next(line for line in text.splitlines() if before in line)
    space = line[: len(line) - len(line.lstrip())]
    boom = "".join(f"{space}{part}\n" for part in _BOOM.format(home=home).splitlines())
    return {file: text.replace(line, boom + line, 1)}


@pytest.mark.parametrize(
    "place", ["module transform", *(pytest.param(one, marks=pytest.mark.slow) for one in ("dataset", "transform"))]
)
def test_exception_shows_the_authors_frames_and_loses_nothing(home: Path, place: str) -> None:
    """The author's file and line come first, the log has it all, and once repaired the run ends as it should."""
    file, before = PLACES[place]
    for name in ("tiny", "whole"):
        write_experiment(home, name, files=broken(home, file, before))
    run_inside(home, name="whole")
    run_inside(home, "--stop-after-epoch", "1")
    (home / "broken").touch()
    done = run_process(home, "--resume")
    assert done.returncode == 1
    # The copy is still what the author wrote, so the frames name the file that the author knows.
    assert f"{home / 'experiment_settings/tiny' / file}" in done.stderr
    assert f"repair it in {home / RESULTS / 'pymodules'}, the copy that runs" in done.stderr
    assert "ValueError: boom" in done.stderr
    assert "pipeline/training" not in done.stderr
    assert "ValueError: boom" in (home / "experiment_logs/tiny/train.log").read_text()
    (home / "broken").unlink()
    assert run_inside(home, "--resume").is_finished
    assert first_difference(home / RESULTS / "data", home / "experiment_results/whole/data") is None


def test_exception_on_one_rank_ends_all_with_its_traceback_once(home: Path) -> None:
    """Rank 1 fails alone: all ranks end, its traceback is in the error file and on the terminal once."""
    text = FILES["pymodules/module_transforms/a.py"].replace(
        "outputs = modules",
        'assert os.environ["RANK"] == "0", "boom"\n                outputs = modules',
    )
    text = text.replace("from pipeline.components", "import os\n\n        from pipeline.components", 1)
    write_experiment(home, files={"pymodules/module_transforms/a.py": text})
    error_file = home / "error.json"
    done = run_process(home, nproc=2, env={"TORCHELASTIC_ERROR_FILE": str(error_file)})
    assert done.returncode == 1
    assert "AssertionError: boom" in json.loads(error_file.read_text())["message"]["message"]
    assert done.stderr.split("ChildFailedError")[0].count("AssertionError: boom") == 1
    assert "another process of this run has failed" in done.stdout


def test_exception_in_a_loader_worker_is_the_authors(home: Path) -> None:
    """What a worker process raises is told with the author's line as well."""
    loaders = {"pymodules/dataloaders/a.py": EXPERIMENT["pymodules/dataloaders/a.py"]}
    write_experiment(home, files={**broken(home, *PLACES["dataset"]), **loaders})
    run_inside(home, "--stop-after-epoch", "0")
    (home / "broken").touch()
    done = run_process(home, "--resume")
    assert done.returncode == 1
    assert "utils/points.py" in done.stderr
    assert "ValueError: boom" in done.stderr


def test_killed_loader_worker_ends_the_run_and_loses_nothing(home: Path) -> None:
    """A loader worker killed from outside, as by a lack of memory, ends the run; it goes on afterwards."""
    for name in ("tiny", "whole"):
        write_experiment(home, name, files=EXPERIMENT, training={"checkpoint_every_steps": 1})
    run_inside(home, name="whole")
    with BackgroundRun(home) as run:
        run.wait_for(lambda: (home / RESULTS / "data/loss_reg_data/train/loss_a/step_data_1.npz").exists())
        worker = next(pid for pid in run.pids() if pid != run.process.pid)
        send(worker, signal.SIGKILL)
        assert run.wait() == 1
        assert "DataLoader worker" in run.text()
    assert run_inside(home, "--resume").is_finished
    assert first_difference(home / RESULTS / "data", home / "experiment_results/whole/data") is None


@pytest.mark.parametrize("method", ["save", "load", "update"])
def test_component_that_fails_leaves_the_last_commit(home: Path, method: str) -> None:
    """An early stopper that raises in any of its methods costs nothing that was committed."""
    text = f"""
        from pathlib import Path

        from pipeline.components import WeightedLossEarlyStopper


        class Stopper(WeightedLossEarlyStopper):
            def {method}(self, *values):
                if Path("{home}/broken").exists():
                    raise ValueError("boom")
                return super().{method}(*values)


        early_stopper = Stopper(max_epochs=3)
    """
    for name in ("tiny", "whole"):
        write_experiment(home, name, files={"pymodules/early_stopper.py": text})
    run_inside(home, name="whole")
    run_inside(home, "--stop-after-epoch", "1")
    (home / "broken").touch()
    with pytest.raises(ValueError, match="boom"):
        run_inside(home, "--resume")
    (home / "broken").unlink()
    assert run_inside(home, "--resume").is_finished
    assert first_difference(home / RESULTS / "data", home / "experiment_results/whole/data") is None


def test_losses_of_a_wrong_shape_are_told(home: Path) -> None:
    """A mean in place of one value per item is refused in a sentence that says what to do."""
    text = FILES["pymodules/module_transforms/a.py"].replace("difference**2,", "(difference**2).mean(),")
    write_experiment(home, files={"pymodules/module_transforms/a.py": text})
    done = run_process(home)
    assert done.returncode == 1
    assert "must return one value per item for 'loss_a', here 4" in done.stderr
    assert "Traceback" not in done.stderr


def test_exit_in_an_authors_code_is_no_success(home: Path) -> None:
    """sys.exit(0) in a component ends the run with 1 and says where."""
    text = """
        import sys

        from pipeline.components import WeightedLossEarlyStopper


        class Stopper(WeightedLossEarlyStopper):
            def update(self, losses, loss_weighter):
                sys.exit(0)


        early_stopper = Stopper(max_epochs=1)
    """
    write_experiment(home, files={"pymodules/early_stopper.py": text})
    done = run_process(home)
    assert done.returncode == 1
    assert "early_stopper.py" in done.stderr


@pytest.mark.slow
def test_random_policy_draws_the_same_on_every_rank(home: Path) -> None:
    """A loss weighter that draws at random has the same weights on all ranks, and after a resume."""
    text = """
        import os
        import random

        from pipeline.components import BaseLossWeighter


        class Random(BaseLossWeighter):
            def before_train_epoch(self, losses):
                with open(os.environ["DRAWN"] + os.environ.get("RANK", "0"), "a") as file:
                    file.write(f"{random.random()}\\n")


        loss_weighter = Random()
    """
    write_experiment(home, files={"pymodules/loss_weighter.py": text})
    variables = {"DRAWN": str(home / "drawn_by_")}
    assert run_process(home, "--stop-after-epoch", "1", nproc=2, env=variables).returncode == 0
    assert run_process(home, "--resume", nproc=2, env=variables).returncode == 0
    first, second = ((home / f"drawn_by_{rank}").read_text().split() for rank in range(2))
    assert first == second
    assert len(set(first)) == 3
