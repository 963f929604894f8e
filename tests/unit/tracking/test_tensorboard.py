"""TensorBoard shows one clean series however often a run was killed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.components import Point, TrackedRun
from pipeline.tracking.tensorboard import TensorBoard


def board(folder: Path, first_step: int) -> TensorBoard:
    """Return TensorBoard as a start that continues at a step has it."""
    tracker = TensorBoard()
    tracker.begin(TrackedRun("tiny", "run", first_step, {}, folder))
    return tracker


def points(steps: Iterable[int], value: float) -> list[Point]:
    return [Point("loss", step, value) for step in steps]


def series(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard's own reader shows, by tag."""
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def test_written_values_are_read_back(tmp_path: Path) -> None:
    """What is published is on disk for a reader at once, without closing the file."""
    board(tmp_path, 0).publish([Point("train/loss", 1, 0.5), Point("train/loss", 2, 0.25)])
    assert series(tmp_path) == {"train/loss": [(1, 0.5), (2, 0.25)]}


def test_killed_writer_and_its_successor_make_one_series(tmp_path: Path) -> None:
    """What a killed run had published beyond its commit is forgotten, so that each step appears once."""
    board(tmp_path, 0).publish(points(range(1, 8), 1.0))
    board(tmp_path, 5).publish(points(range(5, 11), 2.0))
    found = series(tmp_path)["loss"]
    assert [step for step, _ in found] == list(range(1, 11))
    assert [value for _, value in found] == [1.0] * 4 + [2.0] * 6


def test_many_kills_make_one_series(tmp_path: Path) -> None:
    """The files are read in the order of their starts, also beyond nine of them."""
    for start in range(1, 14):
        board(tmp_path, start).publish(points((start, start + 1), float(start)))
    found = series(tmp_path)["loss"]
    assert found == [(step, float(step)) for step in range(1, 14)] + [(14, 13.0)]


def test_clock_that_jumps_back_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are numbered by start, not by time."""
    board(tmp_path, 0).publish(points((1, 2), 1.0))
    monkeypatch.setattr("pipeline.tracking.tensorboard.time.time", lambda: 1000.0)
    board(tmp_path, 2).publish(points((2,), 2.0))
    assert series(tmp_path)["loss"] == [(1, 1.0), (2, 2.0)]


def test_torn_file_of_a_killed_writer_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    """A record cut in two by a power failure hides neither what was before it nor the next file."""
    board(tmp_path, 0).publish(points((1, 2), 1.0))
    (torn,) = tmp_path.iterdir()
    torn.write_bytes(torn.read_bytes()[:-5])
    board(tmp_path, 2).publish(points((2,), 2.0))
    assert series(tmp_path)["loss"] == [(1, 1.0), (2, 2.0)]


def test_value_that_is_not_a_number_is_published_as_such(tmp_path: Path) -> None:
    """TensorBoard marks NaN on the curve."""
    board(tmp_path, 0).publish(points((1,), math.nan))
    assert math.isnan(series(tmp_path)["loss"][0][1])
