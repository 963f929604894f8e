"""Publishing: trackers are mirrors that are fed with committed values only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

from pipeline.experiment.records import Records
from pipeline.runtime.logs import LOGGER
from pipeline.tracking.tensorboard import Point


class Tracker(Protocol):
    """Something that shows values over steps."""

    def publish(self, points: list[Point]) -> None: ...

    def close(self) -> None: ...


class Publisher:
    """Sends what a commit has made permanent, each value once.

    All values are placed on one axis of steps: step ``i`` of epoch ``n`` is ``(n - 1) * num_steps + i``.
    """

    def __init__(self, records: Records, num_steps: int) -> None:
        self._records, self._num_steps, self._trackers = records, num_steps, list[Tracker]()
        self._sent_steps = 0
        self._sent_epochs = dict.fromkeys(records.losses, -1)

    def first_step(self, epoch: int) -> int:
        """Return the place of an epoch's first step; epoch 0 has none and stands before all others."""
        return (epoch - 1) * self._num_steps + 1 if epoch > 0 else 0

    def resume(self, epoch: int) -> None:
        """Treat everything before ``epoch`` as sent; what follows is sent again, into a purged series."""
        self._sent_epochs = dict.fromkeys(self._sent_epochs, epoch - 1)

    def begin_epoch(self) -> None:
        self._sent_steps = 0

    def collect(self, epoch: int) -> list[Point]:
        """Return what is new: the steps of ``epoch`` and the values of epochs that have become complete."""
        points = [*self._step_points(epoch), *self._epoch_points()] if self._trackers else []
        self._sent_steps = self._records.num_steps
        return points

    def send(self, points: list[Point]) -> None:
        """Hand over what was collected and is permanent now."""
        for tracker in list(self._trackers):
            self._guard(tracker, partial(tracker.publish, points))

    def add(self, create: Callable[[], Tracker]) -> None:
        """Take part of a tracker, if it can be created."""
        self._guard(None, lambda: self._trackers.append(create()))

    def close(self) -> None:
        for tracker in list(self._trackers):
            self._guard(tracker, tracker.close)

    def _guard(self, tracker: Tracker | None, action: Callable[[], None]) -> None:
        """Act, and do without a tracker that fails: it is a mirror, never a reason to stop."""
        try:
            action()
        except Exception as error:
            self._trackers = [one for one in self._trackers if one is not tracker]
            LOGGER.warning("A tracker failed: %s. Training goes on without it.", error)

    def _step_points(self, epoch: int) -> Iterator[Point]:
        first = self.first_step(epoch)
        for index in range(self._sent_steps, self._records.num_steps):
            step = first + index
            for register, record in self._records.losses["train"].items():
                if record.step_items[index]:
                    yield f"train_steps/{register}", step, record.step_means[index]
            for optimizer, groups in self._records.rates.items():
                yield f"grad_norm/{optimizer}", step, self._records.grad_norms[optimizer][index]
                for group, rates in groups.items():
                    yield f"lr/{optimizer}/{group}", step, rates[index]

    def _epoch_points(self) -> Iterator[Point]:
        for split, registers in self._records.losses.items():
            latest = self._sent_epochs[split]
            for register, record in registers.items():
                for epoch, mean in zip(record.epochs, record.epoch_means, strict=True):
                    if epoch > self._sent_epochs[split]:
                        latest = max(latest, epoch)
                        yield f"{split}/{register}", epoch * self._num_steps, mean
            self._sent_epochs[split] = latest
