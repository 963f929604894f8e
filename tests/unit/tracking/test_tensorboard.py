"""TensorBoard shows one clean series however often a run was killed."""

from __future__ import annotations

import builtins
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.errors import InvalidExperiment
from pipeline.experiment.records import Records
from pipeline.experiment.settings import LossRegister
from pipeline.tracking.publisher import Publisher
from pipeline.tracking.tensorboard import EventFile, check_installed
from tests.support.experiments import write_experiment
from tests.support.running import run_inside

NUM_STEPS = 4


def publisher_of(found: Records, *trackers: Any) -> Publisher:
    """Return a publisher that feeds these trackers."""
    publisher = Publisher(found, NUM_STEPS)
    for tracker in trackers:
        publisher.add(lambda tracker=tracker: tracker)
    return publisher


def series(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard's own reader shows, by tag."""
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def records() -> Records:
    """Return empty records of one register and one optimizer."""
    return Records([LossRegister("loss")], {"main": {"all": 0.1}})


def train(found: Records, value: float, num_steps: int = 1) -> None:
    """Record so many steps of one item each."""
    for _ in range(num_steps):
        found.add_step_rates({"main": {"all": value / 10}}, {"main": value * 2}, False)
        found.add_step_losses(np.asarray([value]), [1])


def test_written_values_are_read_back(tmp_path: Path) -> None:
    """What is published is on disk for a reader at once, without closing the file."""
    EventFile(tmp_path, 0).publish([("train/loss", 1, 0.5), ("train/loss", 2, 0.25)])
    assert series(tmp_path) == {"train/loss": [(1, 0.5), (2, 0.25)]}


def test_killed_writer_and_its_successor_make_one_series(tmp_path: Path) -> None:
    """What a killed run had published beyond its commit is forgotten, so that each step appears once."""
    EventFile(tmp_path, 0).publish([("loss", step, 1.0) for step in range(1, 8)])
    EventFile(tmp_path, 5).publish([("loss", step, 2.0) for step in range(5, 11)])
    found = series(tmp_path)["loss"]
    assert [step for step, _ in found] == list(range(1, 11))
    assert [value for _, value in found] == [1.0] * 4 + [2.0] * 6


def test_many_kills_make_one_series(tmp_path: Path) -> None:
    """The files are read in the order of their starts, also beyond nine of them."""
    for start in range(1, 14):
        EventFile(tmp_path, start).publish([("loss", step, float(start)) for step in (start, start + 1)])
    found = series(tmp_path)["loss"]
    assert found == [(step, float(step)) for step in range(1, 14)] + [(14, 13.0)]


def test_clock_that_jumps_back_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are numbered by start, not by time."""
    EventFile(tmp_path, 0).publish([("loss", 1, 1.0), ("loss", 2, 1.0)])
    monkeypatch.setattr("pipeline.tracking.tensorboard.time.time", lambda: 1000.0)
    EventFile(tmp_path, 2).publish([("loss", 2, 2.0)])
    assert series(tmp_path)["loss"] == [(1, 1.0), (2, 2.0)]


def test_torn_file_of_a_killed_writer_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    """A record cut in two by a power failure hides neither what was before it nor the next file."""
    EventFile(tmp_path, 0).publish([("loss", 1, 1.0), ("loss", 2, 1.0)])
    (torn,) = tmp_path.iterdir()
    torn.write_bytes(torn.read_bytes()[:-5])
    EventFile(tmp_path, 2).publish([("loss", 2, 2.0)])
    assert series(tmp_path)["loss"] == [(1, 1.0), (2, 2.0)]


def test_publisher_sends_each_committed_value_once(tmp_path: Path) -> None:
    """Steps are sent with the commit that holds them, epochs once they are complete."""
    found, tracker = records(), EventFile(tmp_path, 0)
    publisher = publisher_of(found, tracker)
    train(found, 1.0, 2)
    publisher.send(publisher.collect(1))
    train(found, 2.0, 2)
    found.finish_train_epoch(1)
    publisher.send(publisher.collect(1))
    publisher.send(publisher.collect(1))
    shown = series(tmp_path)
    assert shown["train_steps/loss"] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]
    assert shown["train/loss"] == [(4, 1.5)]
    assert [step for step, _ in shown["lr/main/all"]] == [1, 2, 3, 4]
    assert shown["grad_norm/main"][-1] == (4, 4.0)


def test_steps_of_epochs_stand_behind_one_another(tmp_path: Path) -> None:
    """Step i of epoch n has the place (n - 1) * num_steps + i."""
    found = records()
    publisher = publisher_of(found, EventFile(tmp_path, 0))
    for epoch in (1, 2):
        publisher.begin_epoch()
        found.forget_steps()
        train(found, float(epoch), NUM_STEPS)
        found.finish_train_epoch(epoch)
        publisher.send(publisher.collect(epoch))
    shown = series(tmp_path)
    assert [step for step, _ in shown["train_steps/loss"]] == list(range(1, 9))
    assert [step for step, _ in shown["train/loss"]] == [4, 8]


def test_resumed_publisher_leaves_no_gap_and_no_double(tmp_path: Path) -> None:
    """A run killed after its commit but before publishing is completed by the next one."""
    found = records()
    first = publisher_of(found, EventFile(tmp_path, 0))
    train(found, 1.0, 2)
    first.send(first.collect(1))
    train(found, 2.0, 1)
    second = publisher_of(
        found,
    )
    second._trackers.append(EventFile(tmp_path, second.first_step(1)))
    second.resume(1)
    second.send(second.collect(1))
    assert series(tmp_path)["train_steps/loss"] == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_skipped_step_and_missing_register_are_no_points_of_value_zero(tmp_path: Path) -> None:
    """A register without items in a step has no point there."""
    found = records()
    found.add_step_rates({"main": {"all": 0.1}}, {"main": 1.0}, False)
    found.add_step_losses(np.asarray([0.0]), [0])
    train(found, 3.0)
    publisher = publisher_of(found, EventFile(tmp_path, 0))
    publisher.send(publisher.collect(1))
    assert series(tmp_path)["train_steps/loss"] == [(2, 3.0)]


def test_value_that_is_not_a_number_is_published_as_such(tmp_path: Path) -> None:
    """TensorBoard marks NaN on the curve."""
    EventFile(tmp_path, 0).publish([("loss", 1, math.nan)])
    assert math.isnan(series(tmp_path)["loss"][0][1])


def test_tracker_that_fails_is_left_behind(capsys: pytest.CaptureFixture[str]) -> None:
    """A failing tracker is dropped; the others and the training go on."""

    class Broken:
        num_calls = 0

        def publish(self, points: Any) -> None:
            self.num_calls += 1
            raise ConnectionError("offline")

        def close(self) -> None:
            pass

    class Working(Broken):
        def publish(self, points: Any) -> None:
            self.num_calls += 1

    broken, working = Broken(), Working()
    publisher = publisher_of(records(), broken, working)
    publisher.send(publisher.collect(1))
    publisher.send(publisher.collect(1))
    assert (broken.num_calls, working.num_calls) == (1, 2)


def test_missing_package_is_told_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message holds the pip line."""
    real = builtins.__import__

    def without_tensorboard(name: str, *arguments: Any, **more: Any) -> Any:
        if name == "tensorboard":
            raise ImportError(name)
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without_tensorboard)
    with pytest.raises(InvalidExperiment, match="pip install"):
        check_installed(tmp_path / "logging.json")


def test_run_stopped_and_resumed_has_every_point_once(tmp_path: Path) -> None:
    """Each (tag, step) appears once over a whole experiment that was stopped after each epoch."""
    write_experiment(tmp_path, logging={"tensorboard": {"enabled": True}})
    run_inside(tmp_path, "--stop-after-epoch", "1")
    run_inside(tmp_path, "--resume", "--stop-after-epoch", "2")
    run_inside(tmp_path, "--resume")
    shown = series(tmp_path / "experiment_logs/tiny/tensorboard")
    places = Counter((tag, step) for tag, points in shown.items() for step, _ in points)
    assert set(places.values()) == {1}
    steps = [step for step, _ in shown["train_steps/error"]]
    assert steps == list(range(1, len(steps) + 1))
    assert [len(shown[f"{split}/error"]) for split in ("train", "val")] == [3, 4]


def test_resumed_run_shows_the_curve_of_one_that_never_stopped(tmp_path: Path) -> None:
    """Every value of every curve is the same."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for home in (whole, parts):
        write_experiment(home, logging={"tensorboard": {"enabled": True}})
    run_inside(whole)
    run_inside(parts, "--stop-after-epoch", "2")
    run_inside(parts, "--resume")
    shown = [series(home / "experiment_logs/tiny/tensorboard") for home in (whole, parts)]
    assert shown[0] == shown[1]
