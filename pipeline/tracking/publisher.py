"""Publishing: trackers are mirrors of the results and get committed values only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

from pipeline.checkpoint.records import Records
from pipeline.components import BaseTracker, Image, Point, TrackedRun
from pipeline.paths import ExperimentPaths
from pipeline.system.logging import LOGGER


class ImageFolder:
    """One PNG file for each picture of each evaluation, below the logs.

    They are written before the commit of their evaluation, so that trackers find them again after a kill; readers ask
    for committed epochs only. An evaluation that is done again overwrites its pictures.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, epoch: int, pictures: Mapping[str, bytes]) -> None:
        """Keep pictures by dataset and name; each file is there as a whole or not at all."""
        for name, png in pictures.items():
            dataset, _, title = name.partition("/")
            # An author's title may hold any character, also "/"; quoted, it is one folder.
            target = self._folder / dataset / quote(title, safe="") / f"epoch_{epoch}.png"
            target.parent.mkdir(parents=True, exist_ok=True)
            staging = target.with_suffix(".tmp")
            staging.write_bytes(png)
            staging.replace(target)

    def read(self, epoch: int) -> dict[str, bytes]:
        """Return the pictures of an epoch by dataset and name."""
        files = sorted(self._folder.glob(f"*/*/epoch_{epoch}.png"))
        return {f"{file.parts[-3]}/{unquote(file.parts[-2])}": file.read_bytes() for file in files}


class Batch(NamedTuple):
    """What a commit makes permanent: points, and the epochs whose images may be shown."""

    points: list[Point]
    evaluated: list[int]


class Publisher:
    """Sends what a commit has made permanent, each value once.

    All values are placed on one axis of steps: step ``i`` of epoch ``n`` is ``(n - 1) * num_steps + i``. ``max_steps``
    is where the last epoch ends early.
    """

    def __init__(self, records: Records, num_steps: int, paths: ExperimentPaths, max_steps: int | None = None) -> None:
        self._records = records
        self._num_steps = num_steps
        self._max_steps = max_steps
        self._paths = paths
        self._images = ImageFolder(paths.images)
        self._trackers: dict[str, BaseTracker] = {}
        self._sent_steps = 0
        self._sent_epochs = dict.fromkeys(records.losses, -1)

    def last_step(self, epoch: int) -> int:
        """Return the place of an epoch's last step, where the values of the whole epoch stand too."""
        step = epoch * self._num_steps
        return step if self._max_steps is None else min(step, self._max_steps)

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
        first_lost = tracker.begin(run)
        if first_lost is None:
            return
        # Epoch n ends at step n * num_steps: the first epoch with a lost point is the one that reaches first_lost.
        first_epoch = -(-first_lost // self._num_steps)
        for earlier in range(max(0, first_epoch), epoch):
            points = self._points_of_finished(earlier)
            self._hand_over(tracker, Batch([point for point in points if point.step >= first_lost], [earlier]))

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
        evaluated = [number for number in self._epochs("val") if number > self._sent_epochs["val"]]
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
        images = [
            Image(f"images/{name}", self.last_step(epoch), png)
            for epoch in batch.evaluated
            for name, png in self._images.read(epoch).items()
        ]
        # A tracker need not inherit from BaseTracker, and one that shows points alone is enough.
        if images and hasattr(tracker, "publish_images"):
            tracker.publish_images(images)

    def _guard(self, name: str, action: Callable[[], object]) -> None:
        """Act, and drop a tracker that fails: the results are complete without it."""
        try:
            action()
        except (Exception, SystemExit) as error:
            # Packages for tracking may also call sys.exit, which must not end the training.
            del self._trackers[name]
            LOGGER.warning("The tracker %s failed: %s. Training continues without it.", name, error)

    def _points_of_finished(self, epoch: int) -> Iterator[Point]:
        """Yield all points of an epoch whose steps are in the results."""
        # The records hold the steps of the running epoch only; those of earlier ones are read from their files.
        if epoch > 0:
            yield from self._step_points(self._records.of_epoch(self._paths.data, epoch), epoch, 0)
        for point in self._epoch_points(dict.fromkeys(self._sent_epochs, epoch - 1)):
            if point.step == self.last_step(epoch):
                yield point

    def _step_points(self, records: Records, epoch: int, sent: int) -> Iterator[Point]:
        first = self.first_step(epoch)
        for index in range(sent, records.num_steps):
            step = first + index
            for register, record in records.losses["train"].items():
                # A step that had no items for a register has no value, which is not a point at zero.
                if record.step_items[index]:
                    yield Point(f"train_steps/{register}", step, record.step_means[index])
            for optimizer, groups in records.rates.items():
                yield Point(f"grad_norm/{optimizer}", step, records.grad_norms[optimizer][index])
                for group, rates in groups.items():
                    # A group that was added later has no rate yet.
                    if not math.isnan(rates[index]):
                        yield Point(f"lr/{optimizer}/{group}", step, rates[index])

    def _epochs(self, split: str) -> list[int]:
        return next(iter(self._records.losses[split].values())).epochs

    def _epoch_points(self, sent: Mapping[str, int]) -> Iterator[Point]:
        for split, registers in self._records.losses.items():
            for register, record in registers.items():
                means = zip(record.epochs, record.epoch_means, strict=True)
                tag = f"{split}/{register}"
                yield from (Point(tag, self.last_step(epoch), mean) for epoch, mean in means if epoch > sent[split])
