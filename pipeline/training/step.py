"""The values that go in and out of a training step, and the observer that may watch it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipeline.training.step_plan import BatchRef


@dataclass(frozen=True)
class BatchLosses:
    """The optimised losses of a batch, one value per item, the factor of each in the step's loss, and their sums."""

    losses: list[torch.Tensor]
    scales: list[float]
    sums: list[torch.Tensor]


@dataclass(frozen=True)
class StepRequests:
    """What this rank would like all ranks to do after the step."""

    stop: bool = False
    commit: bool = False


@dataclass(frozen=True)
class StepOutcome:
    """What all ranks know after a step, from the one message they exchanged."""

    skipped: bool
    overflowed: bool
    stop: bool
    commit: bool
    norms: dict[str, float]
    norm: float
    # The optimizers that have applied an update.
    stepped: frozenset[str] = frozenset()


@dataclass(frozen=True)
class StepReport:
    """What the loop around the training stage learns of one step; steps count from 1."""

    step: int
    num_steps: int
    seconds: float
    data_seconds: float
    outcome: StepOutcome
    # Which loss made a step be skipped, in words; empty if none did.
    cause: str = ""


class StepObserver:
    """Called at each step and batch of this rank; changes nothing. This one ignores all it sees."""

    def step_begins(self, epoch: int, step: int) -> None:
        """Called before anything of a step has happened; steps count from 1."""

    def batch_is_loaded(self, position: int, ref: BatchRef, batch: object) -> None:
        """Called with a batch on the device, before the module transform sees it."""

    def losses_are_known(self, position: int, losses: dict[str, torch.Tensor]) -> None:
        """Called with the losses of the same batch, one value per item."""

    def step_ends(self, outcome: StepOutcome) -> None:
        """Called when the weights have been updated, or not."""
