"""The first and the last lines of a run tell what a person wants to know."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.components import LossRecord
from pipeline.errors import StateConflict
from pipeline.paths import ExperimentPaths
from pipeline.progress import FINISHED, TRAINING, Progress
from pipeline.runtime.durable import Disk
from pipeline.runtime.wording import shown_values
from pipeline.tracking.blocks import latest_values, next_line
from tests.support.running import run_inside


def test_first_lines_introduce_the_run(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Version, processes, data home, state, modules, rates, disk, steps and exactness are told."""
    run_inside(home, "--stop-after-epoch", "0")
    text = capsys.readouterr().out
    expected = (
        "training pipeline",
        "processes: 1 on cpu",
        f"data home: {home}",
        "state: starts",
        "learning rates of heads: heads 2.000e-02",
        "dataset a: train 40, val 10 points, batches of 4",
    )
    for words in (*expected, "module stem: 54 parameters, 0 trained", "disk:", "steps:", "resume: exact"):
        assert words in text


def test_disk_that_may_fill_up_is_a_warning_at_the_start(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Less free space than the estimate is told with both numbers and the folder, before any training."""
    monkeypatch.setattr(Disk, "free_bytes", lambda self, path: 3000)
    monkeypatch.setattr(Disk, "check_room", lambda self, path, num_bytes: None)
    run_inside(home, "--stop-after-epoch", "0")
    said = f"WARNING - {home / 'experiment_results/tiny'} may fill its disk: about 3.6 kB are needed and 3.0 kB"
    text = capsys.readouterr().out
    assert text.index(said) < text.index("Epoch(val) [0]")


def test_last_lines_tell_where_everything_is(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Outcome, best epoch, weights, log and what to do next are told."""
    run_inside(home)
    text = capsys.readouterr().out
    for words in ("finished after", "best: epoch", "module_ckps/best", "train.log", "new VARIANT --from tiny"):
        assert words in text


def test_stopped_run_tells_why_and_how_to_continue(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The reason, the place and the command are told."""
    run_inside(home, "--stop-after-epoch", "1")
    text = capsys.readouterr().out
    assert "stopped at epoch 2, training, step 0 (epoch 1 is complete)" in text
    assert f"training_pipeline.py tiny --data-home {home} --resume" in text


def test_unfinished_results_are_refused_with_both_commands(home: Path) -> None:
    """The refusal tells where the experiment stands."""
    run_inside(home, "--stop-after-epoch", "1")
    with pytest.raises(StateConflict, match="epoch 2, training, step 0") as raised:
        run_inside(home)
    assert f"tiny --data-home {home} --resume" in str(raised.value)
    assert f"tiny --data-home {home} --reset" in str(raised.value)


def test_next_command_fits_the_outcome() -> None:
    """A finished experiment is varied, an unfinished one continued."""
    paths = ExperimentPaths(Path("/home"), "tiny")
    assert "--from tiny" in next_line(paths, Progress(FINISHED, 3))
    assert "--resume" in next_line(paths, Progress(TRAINING, 3, 7))


def test_values_that_json_cannot_hold_become_null() -> None:
    """The status file stays JSON whatever the losses are."""
    losses = {"train": {}, "val": {"a": LossRecord(), "b": LossRecord(), "c": LossRecord()}}
    losses["val"]["a"].add_epoch(0, 1.0, 2)
    losses["val"]["b"].add_epoch(0, float("inf"), 2)
    found = latest_values(losses, "val")
    assert found == {"a": 0.5, "b": None}
    assert shown_values(found) == "a: 0.5000, b: nan"
