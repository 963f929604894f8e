"""The losses a component sees: recorded, unweighted, summed over all processes."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass
class LossRecord:
    """What one register recorded in one split.

    ``epoch_…`` have one entry per finished epoch (``epochs`` lists them), ``step_…`` one per step of the
    running training epoch. A mean is a total divided by the number of items. Steps that were skipped
    because a loss or gradient was not finite have a NaN mean and do not count in the epoch's values.
    """

    optimize: bool = True
    direction: str = "min"
    epochs: list[int] = field(default_factory=list)
    epoch_means: list[float] = field(default_factory=list)
    epoch_totals: list[float] = field(default_factory=list)
    epoch_items: list[int] = field(default_factory=list)
    step_means: array[float] = field(default_factory=lambda: array("d"))
    step_totals: array[float] = field(default_factory=lambda: array("d"))
    step_items: array[int] = field(default_factory=lambda: array("q"))

    def add_step(self, total: float, items: int) -> None:
        self.step_means.append(mean(total, items))
        self.step_totals.append(total)
        self.step_items.append(items)

    def add_epoch(self, epoch: int, total: float, items: int) -> None:
        self.epochs.append(epoch)
        self.epoch_means.append(mean(total, items))
        self.epoch_totals.append(total)
        self.epoch_items.append(items)

    def forget_steps(self) -> None:
        del self.step_means[:], self.step_totals[:], self.step_items[:]


Losses = dict[str, dict[str, LossRecord]]


class WeighsLosses(Protocol):
    """Anything that knows the weight of a register."""

    def get_loss_weight(self, register: str) -> float: ...


def mean(total: float, items: int) -> float:
    return total / items if items else math.nan


def num_finished_epochs(losses: Losses) -> int:
    """Return the number of training epochs completed so far."""
    return max((len(record.epochs) for record in losses["train"].values()), default=0)


def weighted_loss(losses: Losses, loss_weighter: WeighsLosses) -> float | None:
    """Return the weighted sum of the latest validation means of the optimised registers.

    None where nothing was ever evaluated; NaN where any of the means is.
    """
    return _sum(
        loss_weighter.get_loss_weight(register) * record.epoch_means[-1]
        for register, record in losses["val"].items()
        if record.optimize and record.epoch_means
    )


def _sum(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) if found else None
