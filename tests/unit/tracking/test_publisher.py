"""Trackers get what is committed, in order, and what they have lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.checkpoint.records import Records
from pipeline.components import BaseTracker, Image, Point, TrackedRun
from pipeline.experiment.settings.settings import LossRegister
from pipeline.paths import ExperimentPaths
from pipeline.system.logging import start_console
from pipeline.tracking.publisher import ImageFolder, Publisher

NUM_STEPS = 4


class StepObserver(BaseTracker):
    """Keeps what it is handed; has lost everything from a step on."""

    def __init__(self, lost: int | None = None) -> None:
        self.lost, self.runs = lost, list[TrackedRun]()
        self.points, self.images = list[Point](), list[Image]()

    def begin(self, run: TrackedRun) -> int | None:
        self.runs.append(run)
        return self.lost

    def publish(self, points: list[Point]) -> None:
        self.points += points

    def publish_images(self, images: list[Image]) -> None:
        self.images += images

    def series(self, tag: str) -> list[tuple[int, float]]:
        return [(point.step, point.value) for point in self.points if point.tag == tag]


def publisher_of(home: Path, records: Records, *trackers: Any, epoch: int = 0) -> Publisher:
    """Return a publisher of an experiment below ``home`` that feeds these trackers."""
    paths = ExperimentPaths(home, "tiny")
    publisher = Publisher(records, NUM_STEPS, paths)
    run = TrackedRun("tiny", "run", 0, {}, paths.logs)
    publisher.begin({f"trackers/{number}": one for number, one in enumerate(trackers)}, run, epoch)
    return publisher


def empty_records() -> Records:
    """Return empty records of one register and one optimizer."""
    return Records([LossRegister("loss")], {"main": {"all": 0.1}})


def train(records: Records, value: float, num_steps: int = 1) -> None:
    """Record so many steps of one item each."""
    for _ in range(num_steps):
        records.add_step_rates({"main": {"all": value / 10}}, {"main": value * 2}, False)
        records.add_step_losses(np.asarray([value]), [1])


def finished_epochs(home: Path, num_epochs: int) -> Records:
    """Return the records of an experiment whose finished epochs lie in its results."""
    records, data = empty_records(), ExperimentPaths(home, "tiny").data
    for epoch in range(1, num_epochs + 1):
        records.forget_steps()
        train(records, float(epoch), NUM_STEPS)
        records.finish_train_epoch(epoch)
        for name, write in {**records.step_files(epoch), **records.epoch_files("train")}.items():
            (data / name).parent.mkdir(parents=True, exist_ok=True)
            with (data / name).open("wb") as file:
                write(file)
    return records


def test_each_committed_value_is_sent_once(tmp_path: Path) -> None:
    """Steps are sent with the commit that holds them, epochs once they are complete."""
    records, tracker = empty_records(), StepObserver()
    publisher = publisher_of(tmp_path, records, tracker)
    train(records, 1.0, 2)
    publisher.send(publisher.collect(1))
    train(records, 2.0, 2)
    records.finish_train_epoch(1)
    publisher.send(publisher.collect(1))
    publisher.send(publisher.collect(1))
    assert tracker.series("train_steps/loss") == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]
    assert tracker.series("train/loss") == [(4, 1.5)]
    assert tracker.series("lr/main/all") == [(1, 0.1), (2, 0.1), (3, 0.2), (4, 0.2)]
    assert tracker.series("grad_norm/main")[-1] == (4, 4.0)


def test_steps_of_epochs_stand_behind_one_another(tmp_path: Path) -> None:
    """Step i of epoch n has the place (n - 1) * num_steps + i."""
    records, tracker = empty_records(), StepObserver()
    publisher = publisher_of(tmp_path, records, tracker)
    for epoch in (1, 2):
        publisher.begin_epoch()
        records.forget_steps()
        train(records, float(epoch), NUM_STEPS)
        records.finish_train_epoch(epoch)
        publisher.send(publisher.collect(epoch))
    assert [step for step, _ in tracker.series("train_steps/loss")] == list(range(1, 9))
    assert [step for step, _ in tracker.series("train/loss")] == [4, 8]


def test_register_without_items_has_no_point(tmp_path: Path) -> None:
    """A step that had nothing for a register is no point of value zero."""
    records, tracker = empty_records(), StepObserver()
    records.add_step_rates({"main": {"all": 0.1}}, {"main": 1.0}, False)
    records.add_step_losses(np.asarray([0.0]), [0])
    train(records, 3.0)
    publisher = publisher_of(tmp_path, records, tracker)
    publisher.send(publisher.collect(1))
    assert tracker.series("train_steps/loss") == [(2, 3.0)]


def test_resumed_run_sends_the_running_epoch_again(tmp_path: Path) -> None:
    """A run killed after its commit but before publishing is completed by the next one, from a step it announces."""
    records, tracker = finished_epochs(tmp_path, 2), StepObserver()
    publisher = publisher_of(tmp_path, records, tracker, epoch=2)
    publisher.resume(2)
    assert tracker.runs[0].first_step == 5
    assert [step for step, _ in tracker.series("train_steps/loss")] == [5, 6, 7, 8]
    assert tracker.series("train/loss") == [(8, 2.0)]


@pytest.mark.parametrize("lost", range(10))
def test_tracker_gets_what_it_has_lost_of_finished_epochs(tmp_path: Path, lost: int) -> None:
    """From the step that it names, every point is handed over in order, whichever epoch it is in."""
    records, tracker = finished_epochs(tmp_path, 3), StepObserver(lost)
    publisher = publisher_of(tmp_path, records, tracker, epoch=3)
    publisher.resume(3)
    expected = list(range(max(1, min(lost, 9)), 13))
    assert [step for step, _ in tracker.series("train_steps/loss")] == expected
    assert [step for step, _ in tracker.series("lr/main/all")] == expected
    assert [step for step, _ in tracker.series("train/loss")] == [step for step in (4, 8, 12) if step >= min(lost, 9)]
    assert [point.step for point in tracker.points] == sorted(point.step for point in tracker.points)


def test_images_are_shown_with_the_commit_of_their_evaluation(tmp_path: Path) -> None:
    """Images that lie in the logs of an evaluation that is not committed are not shown."""
    records, tracker = empty_records(), StepObserver()
    publisher = publisher_of(tmp_path, records, tracker)
    publisher.keep_images(0, lambda: {"a/odd name: ½/x": b"0"})
    publisher.keep_images(1, lambda: {"a/y": b"1"})
    records.losses["val"]["loss"].add_epoch(0, 1.0, 1)
    publisher.send(publisher.collect(0))
    assert tracker.images == [Image("images/a/odd name: ½/x", 0, b"0")]


def test_lost_images_are_shown_again(tmp_path: Path) -> None:
    """They are read from the logs, with the points of their epoch."""
    records, tracker = finished_epochs(tmp_path, 2), StepObserver(0)
    ImageFolder(ExperimentPaths(tmp_path, "tiny").images).write(1, {"a/y": b"1"})
    publisher_of(tmp_path, records, tracker, epoch=2)
    assert tracker.images == [Image("images/a/y", 4, b"1")]


@pytest.mark.parametrize("method", ["begin", "publish", "close"])
def test_tracker_that_fails_is_left_behind(tmp_path: Path, method: str, capsys: pytest.CaptureFixture[str]) -> None:
    """There is one warning, which names it; the others and the training go on."""

    def fail(*arguments: Any) -> None:
        raise ConnectionError("nobody there")

    broken, working = StepObserver(), StepObserver()
    setattr(broken, method, fail)
    start_console("tiny", is_rank_zero=True)
    records = empty_records()
    publisher = publisher_of(tmp_path, records, broken, working)
    for _ in range(3):
        train(records, 1.0)
        publisher.send(publisher.collect(1))
    publisher.close()
    assert len(working.series("train_steps/loss")) == 3
    assert capsys.readouterr().out.count("trackers/0 failed: nobody there") == 1


def test_tracker_that_knows_of_points_alone_is_enough(tmp_path: Path) -> None:
    """Nobody must inherit, and images are optional."""

    class Plain:
        num_points = 0

        def begin(self, run: TrackedRun) -> None:
            assert run.folder.is_dir()

        def publish(self, points: list[Point]) -> None:
            self.num_points += len(points)

        def close(self) -> None:
            pass

    records, tracker = empty_records(), Plain()
    publisher = publisher_of(tmp_path, records, tracker)
    publisher.keep_images(0, lambda: {"a/y": b"1"})
    records.losses["val"]["loss"].add_epoch(0, 1.0, 1)
    publisher.send(publisher.collect(0))
    assert tracker.num_points == 1
    assert list(publisher._trackers) == ["trackers/0"]
