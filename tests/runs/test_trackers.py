"""Every tracker shows one clean series of what was committed, however often a run was stopped or killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.arguments import parse_arguments
from pipeline.distributed.processes import Processes
from pipeline.paths import ExperimentPaths
from pipeline.run import run
from pipeline.serialization.png import size_of
from pipeline.store.compare import first_difference, read_any
from pipeline.store.store import is_settled
from pipeline.system.disk import Disk
from pipeline.tracking.mlflow import DATABASE, local_database
from tests.crash.campaign import survive_kills
from tests.crash.experiment import EVERY_STEPS, NUM_EPOCHS, SEED
from tests.crash.experiment import EXPERIMENT as KILLED_EXPERIMENT
from tests.support.experiments import write_experiment
from tests.support.mirrors import (
    Series,
    mlflow_images,
    mlflow_series,
    prepare_database,
    tensorboard_images,
    tensorboard_series,
    wandb_images,
    wandb_series,
)
from tests.support.running import ENTRY, environment, run_inside, run_process
from tests.support.tracked import OWN_TRACKER, documented_series, own_lines, own_series, with_images, write_tracked

SERIES = {
    "tensorboard": tensorboard_series,
    "wandb": wandb_series,
    "mlflow": mlflow_series,
    "own": own_series,
    "documented": documented_series,
}
IMAGES = {"tensorboard": tensorboard_images, "wandb": wandb_images, "mlflow": mlflow_images}
NUM_STEPS = 5


def recorded(home: Path, num_epochs: int) -> Series:
    """Return every curve as the results themselves tell it."""
    data, series = home / "experiment_results/tiny/data", dict[str, list[tuple[int, float]]]()
    for path in sorted(data.glob("loss_reg_data/*/*/epoch_data.npz")):
        split, register = path.parts[-3:-1]
        found = read_any(path)
        series[f"{split}/{register}"] = list(zip(found["epochs"] * NUM_STEPS, found["means"], strict=True))
    for epoch in range(1, num_epochs + 1):
        for path in sorted(data.glob(f"loss_reg_data/train/*/step_data_{epoch}.npz")):
            columns = read_any(path)
            kept = columns["items"] > 0
            places = (columns["steps"] + (epoch - 1) * NUM_STEPS)[kept]
            series.setdefault(f"train_steps/{path.parent.name}", []).extend(
                zip(places, columns["means"][kept], strict=True)
            )
        for path in sorted(data.glob(f"lr_data/*/step_data_{epoch}.npz")):
            columns = read_any(path)
            places = columns.pop("steps") + (epoch - 1) * NUM_STEPS
            for name, values in columns.items():
                optimizer, group = path.parent.name, name.removeprefix("lr_")
                tag = f"grad_norm/{optimizer}" if name == "grad_norms" else f"lr/{optimizer}/{group}"
                series.setdefault(tag, []).extend(zip(places, values, strict=True))
    return series


def check_mirrors(home: Path, num_epochs: int, num_pictures: int) -> None:
    """Every tracker has exactly the recorded points, each once, and every evaluation's images."""
    logs, expected = home / "experiment_logs/tiny", recorded(home, num_epochs)
    for name, read in SERIES.items():
        shown = read(logs)
        assert sorted(shown) == sorted(expected), name
        for tag, points in expected.items():
            assert [step for step, _ in shown[tag]] == [step for step, _ in points], f"{name}: {tag}"
            values = [np.float32([value for _, value in one]) for one in (shown[tag], points)]
            np.testing.assert_array_equal(*values, err_msg=f"{name}: {tag}")
    images = {name: read(logs) for name, read in IMAGES.items()}
    assert len(images["tensorboard"]) == num_pictures * (num_epochs + 1)
    assert all(found == images["tensorboard"] for found in images.values())


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty MLflow database, which takes MLflow seconds to make."""
    folder = tmp_path_factory.mktemp("mlflow")
    local_database(folder)
    return folder / DATABASE


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, database: Path) -> Path:
    """The experiment with all trackers, stopped after each epoch and resumed."""
    home = tmp_path_factory.mktemp("stopped")
    write_tracked(home)
    prepare_database(home / "experiment_logs/tiny", database)
    run_inside(home, "--stop-after-epoch", "1")
    run_inside(home, "--resume", "--stop-after-epoch", "2")
    run_inside(home, "--resume")
    return home


def test_stopped_and_resumed_run_is_shown_as_one_series(stopped: Path) -> None:
    """Scalars, learning rates, gradient norms and images of both datasets are there once in every tracker."""
    check_mirrors(stopped, num_epochs=3, num_pictures=4)


def test_every_start_has_the_same_run_id(stopped: Path) -> None:
    """It is told to the tracker with the step from which on points come again, and the settings."""
    starts = [line for line in own_lines(stopped / "experiment_logs/tiny") if "run_id" in line]
    assert len({line["run_id"] for line in starts}) == 1
    assert [line["first_step"] for line in starts] == [0, 1, 6]
    assert {line["seed"] for line in starts} == {3}


def test_trackers_and_images_change_no_bit_of_the_training(stopped: Path, tmp_path: Path) -> None:
    """Not even images that draw random numbers and overwrite buffers."""
    write_experiment(tmp_path)
    run_inside(tmp_path)
    data = "experiment_results/tiny/data"
    assert first_difference(tmp_path / data, stopped / data) is None


def test_images_lie_in_the_logs(stopped: Path) -> None:
    """Nobody needs a tracker to look at them."""
    files = sorted((stopped / "experiment_logs/tiny/images").rglob("*.png"))
    assert len(files) == 4 * 4
    assert size_of(files[0].read_bytes()) == (6, 4)


def test_reset_gives_another_run_id(tmp_path: Path) -> None:
    """What comes after a reset is another run for every tracker."""
    write_experiment(tmp_path, files={"pymodules/trackers/lines.py": OWN_TRACKER})
    logs, ids = tmp_path / "experiment_logs/tiny", list[str]()
    for words in ((), ("--reset",)):
        run_inside(tmp_path, *words, "--stop-after-epoch", "0")
        ids += [line["run_id"] for line in own_lines(logs) if "run_id" in line]
    assert len(set(ids)) == len(ids) == 2


@pytest.mark.parametrize("what", ["images", "tracker"])
def test_failing_tracker_or_image_is_one_warning(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Training goes to its end without it."""
    files: dict[str, Any] = {
        "images": {
            "pymodules/module_transforms/b.py": """
                from . import a

                loss_registers = ["loss_b", "error"]


                class ModuleTransform(a.ModuleTransform):
                    head = "head_b"
                    register = "loss_b"

                    def images(self, batch, modules):
                        raise OSError("no colours")
            """
        },
        "tracker": {
            "pymodules/trackers/lines.py": """
                from pipeline.components import BaseTracker


                class Broken(BaseTracker):
                    def publish(self, points):
                        raise OSError("no colours")


                tracker = Broken()
            """
        },
    }
    write_experiment(tmp_path, files=files[what])
    assert run_inside(tmp_path).is_finished
    shown = capsys.readouterr().out
    assert shown.count("no colours") == 1
    assert f"{'module_transforms/b.py' if what == 'images' else 'trackers/lines'}" in shown


class DiesWhenFinished(Disk):
    """Kills its process with the last commit."""

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        if target.name == "state.json" and '"finished"' in target.read_text():
            os.kill(os.getpid(), signal.SIGKILL)


def test_run_killed_right_after_its_last_commit_is_shown_to_its_end(tmp_path: Path, database: Path) -> None:
    """The next start finds it finished, and gives trackers the points and images that are missing; once."""
    write_tracked(tmp_path)
    prepare_database(tmp_path / "experiment_logs/tiny", database)
    line = "from tests.runs.test_trackers import dies; import sys; dies(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", line, str(tmp_path)], env=environment(), cwd=ENTRY.parent, check=False)
    assert done.returncode == -signal.SIGKILL
    assert "val/error" in tensorboard_series(tmp_path / "experiment_logs/tiny")
    assert not is_settled(ExperimentPaths(tmp_path, "tiny"))
    assert run_inside(tmp_path, "--auto").is_finished
    check_mirrors(tmp_path, num_epochs=3, num_pictures=4)
    num_lines = len(own_lines(tmp_path / "experiment_logs/tiny"))
    assert run_inside(tmp_path, "--auto").is_finished
    assert len(own_lines(tmp_path / "experiment_logs/tiny")) == num_lines


def dies(home: str) -> None:
    """Run in this process, which dies with the last commit, before anything of it is published."""
    run_inside(Path(home), disk=DiesWhenFinished())


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_killed_runs_leave_no_point_twice_and_none_out(nproc: int, tmp_path: Path) -> None:
    """After several kills, every tracker has every point and image once."""
    transform = KILLED_EXPERIMENT["pymodules/module_transforms/a.py"] or ""
    files = {**KILLED_EXPERIMENT, "pymodules/module_transforms/a.py": with_images(transform)}
    write_tracked(tmp_path, files, training={"seed": SEED, "checkpoint_every_steps": EVERY_STEPS})
    lives = list(survive_kills(tmp_path, nproc, 4, seed=nproc))
    assert sum(life.was_killed for life in lives) >= 3
    assert not any(life.processes_left for life in lives)
    assert run_process(tmp_path, "--auto").returncode == 0
    check_mirrors(tmp_path, num_epochs=NUM_EPOCHS, num_pictures=4)


def test_run_under_observation_publishes_nothing(tmp_path: Path) -> None:
    """What verify-resume and replay run on a copy is no run of the experiment."""
    write_experiment(tmp_path, files={"pymodules/trackers/lines.py": OWN_TRACKER})
    words = ["tiny", "--data-home", str(tmp_path), "--stop-after-epoch", "0"]
    run(parse_arguments(words), Processes(), watch=lambda session: None)
    assert not (tmp_path / "experiment_logs/tiny/trackers").exists()


def test_wandb_writes_where_its_own_variable_says(tmp_path: Path) -> None:
    """WANDB_DIR moves the files away from a small quota; starts still become one run there."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    logging = {"wandb": {"enabled": True, "mode": "offline"}}
    write_experiment(tmp_path, logging=logging)
    for words in (["--stop-after-epoch", "1"], ["--resume"]):
        done = run_process(tmp_path, *words, env={"WANDB_DIR": str(elsewhere)})
        assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "experiment_logs/tiny").glob("wandb/*"))
    assert len(list(elsewhere.glob("wandb/offline-run-*"))) == 1
    assert len(wandb_series(elsewhere)["val/loss_a"]) == 4
