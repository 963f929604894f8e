"""The story has everything that was recorded, for any state of an experiment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.monitoring.experiment_state import read_experiment_state
from pipeline.paths import ExperimentPaths
from pipeline.report.data import Story, collect
from pipeline.report.series import MAX_POINTS
from tests.support.experiments import write_experiment
from tests.support.running import run_inside


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> ExperimentPaths:
    """The tiny experiment, stopped after its first epoch and resumed to its end."""
    home = tmp_path_factory.mktemp("story")
    write_experiment(home)
    run_inside(home, "--stop-after-epoch", "1")
    run_inside(home, "--resume")
    return ExperimentPaths(home, "tiny")


def story_of(paths: ExperimentPaths, max_points: int = MAX_POINTS) -> Story:
    return collect(read_experiment_state(paths), max_points)


def test_story_has_every_recorded_curve(resumed: ExperimentPaths) -> None:
    """Registers of both splits and every step, rates, norms, weights, times and memory are there."""
    curves = story_of(resumed)["curves"]
    assert {name: len(series["y"]) for name, series in curves["val"].items()} == dict.fromkeys(curves["steps"], 4)
    assert curves["train"]["loss_a"]["x"] == [1, 2, 3]
    assert curves["steps"]["loss_a"]["x"][-1] == 3
    assert set(curves["rates"]) == {"heads/heads", "trunk/trunk"}
    assert set(curves["grad_norms"]) == {"heads", "trunk"}
    assert set(curves["loss_weights"]) == {"loss_a", "loss_b", "error"}
    assert curves["times"]["training"]["x"] == [1, 2, 3]
    assert curves["times"]["validation"]["x"] == [0, 1, 2, 3]
    assert all(value > 0 for value in curves["memory"]["memory"]["y"])


def test_story_tells_starts_and_their_places(resumed: ExperimentPaths) -> None:
    """The first start was stopped, the second began where it ended, and the best epoch is known."""
    story = story_of(resumed)
    assert [(start["outcome"], start["epoch"]) for start in story["starts"]] == [("stopped", 0), ("finished", 1)]
    assert story["state"] == "finished"
    assert story["best"] is not None
    assert story["best"]["values"].keys() == {"loss_a", "loss_b", "error"}
    assert story["registers"][-1].items() >= {"name": "error", "optimize": False, "direction": "min"}.items()
    assert story["settings"]["training.seed"] == 3


def test_story_is_json_and_touches_nothing(resumed: ExperimentPaths) -> None:
    """It can be embedded as it is, and telling it changes no file."""
    before = {path: path.stat().st_mtime_ns for path in resumed.home.rglob("*")}
    json.dumps(story_of(resumed), allow_nan=False)
    assert {path: path.stat().st_mtime_ns for path in resumed.home.rglob("*")} == before


def test_resume_inside_an_epoch_has_its_place(home: Path) -> None:
    """A start from step 2 of 5 stands at two fifths of the epoch."""
    run_inside(home, "--stop-after-epoch", "1")
    paths = ExperimentPaths(home, "tiny")
    num_steps = round(1 / story_of(paths)["curves"]["rates"]["heads/heads"]["x"][0])
    said = {"from": {"stage": "training", "epoch": 2, "step": 2}}
    paths.starts_file.write_text(paths.starts_file.read_text() + json.dumps(said) + "\n")
    assert story_of(paths)["starts"][1]["epoch"] == pytest.approx(1 + 2 / num_steps, abs=1e-4)


def test_many_series_share_the_room(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many series there are, the page stays small."""
    run_inside(home, "--stop-after-epoch", "1")
    monkeypatch.setattr("pipeline.report.data._MAX_SERIES", 1)
    monkeypatch.setattr("pipeline.report.data._MIN_POINTS", 2)
    assert len(story_of(ExperimentPaths(home, "tiny"), 40)["curves"]["rates"]["heads/heads"]["x"]) == 2


def test_story_of_an_experiment_whose_state_is_damaged(home: Path) -> None:
    """What is shown in data/ is told even if no commit can be read; settings that are broken are left out."""
    run_inside(home, "--stop-after-epoch", "1")
    paths = ExperimentPaths(home, "tiny")
    paths.state_file.write_text("{}")
    (paths.results / "settings/training.json").write_text("{")
    story = story_of(paths)
    assert (story["place"], story["best"], story["state"]) == (None, None, "stopped")
    assert len(story["curves"]["val"]["loss_a"]["y"]) == 2
    assert "training.seed" not in story["settings"]
