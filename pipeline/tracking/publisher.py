"""Publishing: trackers are mirrors that are fed with committed values only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from pipeline.checkpoint.records import Records
from pipeline.components import BaseTracker, Image, Point, TrackedRun
from pipeline.paths import ExperimentPaths
from pipeline.system.logging import LOGGER
from pipeline.tracking.images import ImageFolder


class Batch(NamedTuple):
    """What a commit makes permanent: points, and the epochs whose images may be shown."""

    points: list[Point]
    evaluated: list[int]


class Publisher:
    """Sends what a commit has made permanent, each value once.

    All values are placed on one axis of steps: step ``i`` of epoch ``n`` is ``(n - 1) * num_steps + i``.
    """

    def __init__(self, records: Records, num_steps: int, paths: ExperimentPaths) -> None:
        self._records = records
        self._num_steps = num_steps
        self._paths = paths
        self._images = ImageFolder(paths.images)
        self._trackers: dict[str, BaseTracker] = {}
        self._sent_steps = 0
        self._sent_epochs = dict.fromkeys(records.losses, -1)

    def first_step(self, epoch: int) -> int:
        """Return the place of an epoch's first step; epoch 0 has none and stands before all others."""
        return (epoch - 1) * self._num_steps + 1 if epoch > 0 else 0

    def begin(self, trackers: Mapping[str, BaseTracker], run: TrackedRun, epoch: int) -> None:
        """Introduce trackers to the run; each gets again what it has lost of the epochs before ``epoch``."""
        for name, tracker in trackers.items():
            self._trackers[name] = tracker
            described = replace(run, first_step=self.first_step(epoch), folder=run.folder / name)
            self._guard(name, partial(self._introduce, tracker, described, epoch))

    def _introduce(self, tracker: BaseTracker, run: TrackedRun, epoch: int) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        lost = tracker.begin(run)
        if lost is not None:
            first = -(-lost // self._num_steps)
            for earlier in range(max(0, first), epoch):
                points = self._finished_epoch(earlier)
                self._hand_over(tracker, Batch([point for point in points if point.step >= lost], [earlier]))

    def resume(self, epoch: int) -> None:
        """Send ``epoch`` again, from its first step on; everything before it counts as sent."""
        self._sent_epochs = dict.fromkeys(self._sent_epochs, epoch - 1)
        self.send(self.collect(epoch))

    def begin_epoch(self) -> None:
        self._sent_steps = 0

    def keep_images(self, epoch: int, take: Callable[[], dict[str, bytes]]) -> None:
        """Put images into the logs, from where they are shown once their evaluation is committed."""
        try:
            self._images.write(epoch, take())
        except OSError as error:
            LOGGER.warning("Images of epoch %d could not be kept: %s. Training continues.", epoch, error)

    def collect(self, epoch: int) -> Batch:
        """Return what is new: the steps of ``epoch`` and the values of epochs that have become complete."""
        if not self._trackers:
            return Batch([], [])
        points = [*self._step_points(self._records, epoch, self._sent_steps), *self._epoch_points(self._sent_epochs)]
        self._sent_steps = self._records.num_steps
        evaluated = [one for one in self._epochs("val") if one > self._sent_epochs["val"]]
        self._sent_epochs = {split: max([*self._epochs(split), sent]) for split, sent in self._sent_epochs.items()}
        return Batch(points, evaluated)

    def send(self, batch: Batch) -> None:
        """Hand over what was collected and is permanent now."""
        for name, tracker in list(self._trackers.items()):
            self._guard(name, partial(self._hand_over, tracker, batch))

    def close(self) -> None:
        for name, tracker in list(self._trackers.items()):
            self._guard(name, tracker.close)

    def _hand_over(self, tracker: BaseTracker, batch: Batch) -> None:
        if batch.points:
            tracker.publish(batch.points)
        if images := [one for epoch in batch.evaluated for one in self._images_of(epoch)]:
            # A tracker that merely follows the contract may know of points alone.
            getattr(tracker, "publish_images", lambda images: None)(images)

    def _images_of(self, epoch: int) -> Iterator[Image]:
        for name, png in self._images.read(epoch).items():
            yield Image(f"images/{name}", epoch * self._num_steps, png)

    def _guard(self, name: str, action: Callable[[], Any]) -> None:
        """Act, and do without a tracker that fails: it is a mirror, never a reason to stop."""
        try:
            action()
        except (Exception, SystemExit) as error:
            del self._trackers[name]
            LOGGER.warning("The tracker %s failed: %s. Training continues without it.", name, error)

    def _finished_epoch(self, epoch: int) -> Iterator[Point]:
        """Yield all points of an epoch whose steps are in the results."""
        if epoch > 0:
            yield from self._step_points(self._records.of_epoch(self._paths.data, epoch), epoch, 0)
        for point in self._epoch_points(dict.fromkeys(self._sent_epochs, epoch - 1)):
            if point.step == epoch * self._num_steps:
                yield point

    def _step_points(self, records: Records, epoch: int, sent: int) -> Iterator[Point]:
        first = self.first_step(epoch)
        for index in range(sent, records.num_steps):
            step = first + index
            for register, record in records.losses["train"].items():
                if record.step_items[index]:
                    yield Point(f"train_steps/{register}", step, record.step_means[index])
            for optimizer, groups in records.rates.items():
                yield Point(f"grad_norm/{optimizer}", step, records.grad_norms[optimizer][index])
                for group, rates in groups.items():
                    yield Point(f"lr/{optimizer}/{group}", step, rates[index])

    def _epochs(self, split: str) -> list[int]:
        return next(iter(self._records.losses[split].values())).epochs

    def _epoch_points(self, sent: Mapping[str, int]) -> Iterator[Point]:
        for split, registers in self._records.losses.items():
            for register, record in registers.items():
                for epoch, mean in zip(record.epochs, record.epoch_means, strict=True):
                    if epoch > sent[split]:
                        yield Point(f"{split}/{register}", epoch * self._num_steps, mean)
