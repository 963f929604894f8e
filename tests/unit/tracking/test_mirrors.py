"""W&B and MLflow hold every point once, whatever a kill has left of what was sent."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.components import BaseTracker, Image, Point, TrackedRun
from pipeline.errors import InvalidExperiment
from pipeline.experiment.settings.settings import LoggingSettings, MlflowSettings, WandbSettings
from pipeline.serialization.png import png_of
from pipeline.tracking import factory as trackers
from pipeline.tracking.mlflow import DATABASE, Mlflow, local_database
from pipeline.tracking.wandb import STEP, Wandb
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
    local_database(folder)
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
def test_second_start_goes_on_with_the_same_run(name: str, logs: Path) -> None:
    """It names the step from which on it wants points, and has each of them once."""
    first, _ = start(name, logs)
    first.publish(points(1, 4))
    first.publish_images([Image("images/a/picture", 4, PICTURE)])
    first.close()
    second, lost = start(name, logs)
    assert lost == {"wandb": 0, "mlflow": 4}[name]
    second.publish([*points(1, 6), Point("val/loss", 6, 1.0)])
    second.publish_images([Image("images/a/picture", step, PICTURE) for step in (4, 6)])
    second.close()
    series, images = (read(logs) for read in READERS[name])
    assert [step for step, _ in series["loss"]] == [1, 2, 3, 4, 5, 6]
    assert series["val/loss"] == [(6, 1.0)]
    assert sorted(images) == [("images/a/picture", 4), ("images/a/picture", 6)]


def test_mlflow_run_of_another_id_is_another_run(logs: Path) -> None:
    """An experiment that was reset does not go on in the run it had before."""
    start("mlflow", logs, "abc")[0].publish(points(1, 4))
    assert start("mlflow", logs, "xyz")[1] == 0


def test_mlflow_keeps_values_that_are_no_numbers(logs: Path) -> None:
    """NaN is a value of a step that was skipped, and odd letters in a tag are no reason to fail."""
    start("mlflow", logs)[0].publish([Point("odd (name)", 1, float("nan"))])
    ((step, value),) = mlflow_series(logs)["odd _name_"]
    assert step == 1
    assert np.isnan(value)


def test_database_that_was_being_made_at_a_kill_is_made_anew(database: Path) -> None:
    """Only a whole database gets the name under which it is used, and what was left of another is gone."""
    assert [path.name for path in database.parent.iterdir()] == [DATABASE]


def test_wandb_keeps_the_fullest_folder_until_another_has_outgrown_it(logs: Path) -> None:
    """What killed starts have left is removed, and the best there is only when the whole run is in another folder."""
    first, _ = start("wandb", logs)
    first.publish(points(1, 50))
    first.close()
    (full,) = (logs / "wandb").glob("offline-run-*")
    dead = logs / "wandb/offline-run-20200101_000000-abc"
    dead.mkdir()
    (dead / "run-abc.wandb").write_bytes(b":W&B123")
    second, _ = start("wandb", logs)
    second.close()
    assert full.is_dir()
    assert not dead.exists()
    third, _ = start("wandb", logs)
    third.publish(points(1, 60))
    third.close()
    assert len(wandb_series(logs)["loss"]) == 60


def test_wandb_sends_what_the_server_has_not_got(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Online, rows go on behind those of the server, whose last row may lack some values."""
    rows = [{"_step": 6, STEP: 3, "loss": 0.5, "val/loss": None}, {"_step": 7, STEP: 4, "loss": 0.5, "val/loss": None}]
    sent: list[tuple[dict[str, Any], int]] = []

    def log(row: dict[str, Any], step: int, commit: bool) -> None:
        sent.append((row, step))

    run = SimpleNamespace(starting_step=8, define_metric=lambda *names, **more: None, log=log)
    tracker = Wandb(WandbSettings(enabled=True, mode="online"))
    monkeypatch.setattr(tracker, "_open_run", lambda run_: run)
    monkeypatch.setattr(tracker, "_read_server_rows", lambda: rows)
    assert tracker.begin(TrackedRun("tiny", "abc", 3, {}, logs)) == 4
    tracker.publish([*points(4, 5), Point("val/loss", 4, 1.0)])
    assert sent == [
        ({STEP: 4, "lr/main/all": 1.0, "val/loss": 1.0}, 8),
        ({STEP: 5, "loss": 1.25, "lr/main/all": 1.25}, 9),
    ]


def test_missing_packages_are_told_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is missing is told at once, each with the line that installs it."""
    monkeypatch.setattr(trackers, "find_spec", lambda name: None if name in ("wandb", "alembic") else name)
    asked = LoggingSettings(False, tensorboard=True, wandb=WandbSettings(True), mlflow=MlflowSettings(True))
    with pytest.raises(InvalidExperiment) as refusal:
        trackers.check_installed(asked, tmp_path / "logging.json")
    fixes = [problem.fix for problem in refusal.value.problems]
    assert fixes == ["pip install 'training-pipeline[wandb]'", "pip install 'training-pipeline[mlflow]'"]
