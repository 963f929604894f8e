"""W&B and MLflow hold every point once, whatever a kill has left of what was sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.components import BaseTracker, Image, Point, TrackedRun
from pipeline.errors import InvalidExperiment
from pipeline.experiment.settings import LoggingSettings, MlflowSettings, WandbSettings
from pipeline.runtime.png import png_of
from pipeline.tracking import trackers
from pipeline.tracking.mlflow import DATABASE, Mlflow, _database
from pipeline.tracking.wandb import Wandb
from pipeline.tracking.wandb_files import history_rows
from tests.support.mirrors import mlflow_images, mlflow_series, prepare_database, wandb_images, wandb_series

MIRRORS: dict[str, Any] = {
    "wandb": lambda: Wandb(WandbSettings(enabled=True, mode="offline")),
    "mlflow": lambda: Mlflow(MlflowSettings(enabled=True)),
}
READERS: dict[str, Any] = {"wandb": (wandb_series, wandb_images), "mlflow": (mlflow_series, mlflow_images)}
PICTURE = png_of(np.zeros((2, 3)))


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty MLflow database as a first start makes it."""
    folder = tmp_path_factory.mktemp("mlflow")
    (folder / "dead.new").write_bytes(b"what a killed start has left")
    _database(folder)
    return folder / DATABASE


@pytest.fixture
def logs(tmp_path: Path, database: Path) -> Path:
    prepare_database(tmp_path, database)
    return tmp_path


def start(name: str, logs: Path, run_id: str = "abc") -> tuple[BaseTracker, int | None]:
    """Let a tracker begin as a start of the experiment would, and return what it has lost."""
    tracker: BaseTracker = MIRRORS[name]()
    (logs / name).mkdir(exist_ok=True)
    return tracker, tracker.begin(TrackedRun("group/tiny", run_id, 3, {"training": {"seed": 1}}, logs / name))


def points(first: int, last: int) -> list[Point]:
    return [Point(tag, step, step / 4) for step in range(first, last + 1) for tag in ("loss", "lr/main/all")]


@pytest.mark.parametrize("name", MIRRORS)
def test_points_and_images_are_read_back(name: str, logs: Path) -> None:
    """What was published is what the tracker's own reader finds."""
    tracker, _ = start(name, logs)
    tracker.publish(points(1, 3))
    tracker.publish_images([Image("images/a/picture", 3, PICTURE)])
    tracker.close()
    series, images = (read(logs) for read in READERS[name])
    assert series == {tag: [(1, 0.25), (2, 0.5), (3, 0.75)] for tag in ("loss", "lr/main/all")}
    assert images == {("images/a/picture", 3): PICTURE}


@pytest.mark.parametrize("name", MIRRORS)
def test_points_that_are_there_are_not_sent_again(name: str, logs: Path) -> None:
    """A second start with the same run id goes on with the same run, names its last step and skips what it has."""
    first, _ = start(name, logs)
    first.publish(points(1, 4))
    first.publish_images([Image("images/a/picture", 4, PICTURE)])
    first.close()
    second, lost = start(name, logs)
    second.publish([*points(3, 6), Point("val/loss", 4, 1.0)])
    second.publish_images([Image("images/a/picture", step, PICTURE) for step in (4, 6)])
    second.close()
    assert lost == 4
    series, images = (read(logs) for read in READERS[name])
    assert [step for step, _ in series["loss"]] == [1, 2, 3, 4, 5, 6]
    assert series["val/loss"] == [(4, 1.0)]
    assert sorted(images) == [("images/a/picture", 4), ("images/a/picture", 6)]


@pytest.mark.parametrize("name", MIRRORS)
def test_other_run_id_is_another_run(name: str, logs: Path) -> None:
    """An experiment that was reset does not go on in the run it had before."""
    first, _ = start(name, logs, "abc")
    first.publish(points(1, 4))
    first.close()
    second, lost = start(name, logs, "xyz")
    second.close()
    assert not lost


def test_mlflow_keeps_values_that_are_no_numbers(logs: Path) -> None:
    """NaN is a value of a step that was skipped."""
    tracker, _ = start("mlflow", logs)
    tracker.publish([Point("odd (name)", 1, float("nan"))])
    ((step, value),) = mlflow_series(logs)["odd _name_"]
    assert step == 1
    assert np.isnan(value)


def test_wandb_file_cut_anywhere_gives_the_rows_before(logs: Path) -> None:
    """A file torn by a kill is read as far as it goes, also over the borders of its blocks."""
    tracker, _ = start("wandb", logs)
    tracker.publish(points(1, 600))
    tracker.close()
    (file,) = logs.rglob("*.wandb")
    content = file.read_bytes()
    assert len(content) > 3 << 15
    for length in (0, 3, 7, 40, 1 << 15, (1 << 15) + 3, len(content) - 900, len(content)):
        file.write_bytes(content[:length])
        steps = [int(row["step"]) for row in history_rows(file)]
        assert steps == list(range(1, len(steps) + 1))
    assert len(steps) == 600


def test_missing_packages_are_told_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is missing is told at once, each with the line that installs it."""
    monkeypatch.setattr(trackers, "find_spec", lambda name: None if name in ("wandb", "alembic") else name)
    asked = LoggingSettings(False, tensorboard=True, wandb=WandbSettings(True), mlflow=MlflowSettings(True))
    with pytest.raises(InvalidExperiment) as refusal:
        trackers.check_installed(asked, tmp_path / "logging.json")
    fixes = [problem.fix for problem in refusal.value.problems]
    assert fixes == ["pip install 'training-pipeline[wandb]'", "pip install 'training-pipeline[mlflow]'"]


def test_database_that_was_being_made_at_a_kill_is_made_anew(database: Path) -> None:
    """Only a whole database gets the name under which it is used, and what was left of another is gone."""
    assert [path.name for path in database.parent.iterdir()] == [DATABASE]
