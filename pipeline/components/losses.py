"""The losses that components see: recorded, unweighted, summed over all ranks."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from typing import Protocol


def _new_floats() -> array[float]:
    return array("d")


def _new_integers() -> array[int]:
    return array("q")


@dataclass
class LossRecord:
    """The values of one register in one split.

    ``epoch_…`` have one entry per finished epoch, whose numbers are in ``epochs``; ``step_…`` have one entry per step
    of the running training epoch. A mean is a total divided by a number of items. A step that was skipped because a
    loss or gradient was not finite has a NaN mean and does not count in the values of the epoch.
    """

    optimize: bool = True
    direction: str = "min"
    epochs: list[int] = field(default_factory=list)
    epoch_means: list[float] = field(default_factory=list)
    epoch_totals: list[float] = field(default_factory=list)
    epoch_items: list[int] = field(default_factory=list)
    # Arrays, because an epoch may have many steps: a list of floats takes four times the memory.
    step_means: array[float] = field(default_factory=_new_floats)
    step_totals: array[float] = field(default_factory=_new_floats)
    step_items: array[int] = field(default_factory=_new_integers)

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


# By split ("train", "val", "test"), then by register.
Losses = dict[str, dict[str, LossRecord]]


class WeighsLosses(Protocol):
    """Any object that returns the weight of a register; a loss weighter need not inherit from ``BaseLossWeighter``."""

    def get_loss_weight(self, register: str) -> float: ...


def mean(total: float, items: int) -> float:
    return total / items if items else math.nan


def num_finished_epochs(losses: Losses) -> int:
    """Return the number of training epochs completed so far."""
    return max((len(record.epochs) for record in losses["train"].values()), default=0)


def weighted_loss(losses: Losses, loss_weighter: WeighsLosses) -> float | None:
    """Return the weighted sum of the latest validation means of the optimised registers.

    None if nothing was evaluated yet; NaN if any of the means is NaN.
    """
    weighted_means = [
        loss_weighter.get_loss_weight(register) * record.epoch_means[-1]
        for register, record in losses["val"].items()
        if record.optimize and record.epoch_means
    ]
    # An empty sum would be 0, which early stoppers would take for the best loss.
    return sum(weighted_means) if weighted_means else None
