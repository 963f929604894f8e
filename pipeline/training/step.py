"""The values that go in and out of a training step, and the observer that may watch it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pipeline.training.step_plan import BatchRef


@dataclass(frozen=True)
class BatchLosses:
    """Where the backward pass of a batch begins, by name, with the factor of each in the step's loss.

    Most often these are the losses that an optimizer follows, by register, with a value per item. The sums, by
    register, tell whether all values are finite.
    """

    losses: dict[str, torch.Tensor]
    scales: dict[str, float]
    sums: dict[str, torch.Tensor]

    @classmethod
    def of_nothing(cls) -> BatchLosses:
        """Return the losses of a rank that has no batch."""
        return cls({}, {}, {})


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

    @classmethod
    def of_turns(cls, outcomes: Sequence[StepOutcome]) -> StepOutcome:
        """Return what a step came to whose turns, one or several, had these outcomes."""
        last = outcomes[-1]
        norms = {
            name: next((norm for one in reversed(outcomes) if (norm := one.norms[name]) != 0), 0.0)
            for name in last.norms
        }
        bad = [outcome for outcome in outcomes if outcome.skipped]
        return cls(
            # A turn that is skipped alone is not a step that was.
            skipped=len(bad) == len(outcomes),
            overflowed=bool(bad) and all(outcome.overflowed for outcome in bad),
            stop=last.stop,
            commit=last.commit,
            norms=norms,
            norm=math.hypot(*norms.values()),
            stepped=frozenset[str]().union(*(outcome.stepped for outcome in outcomes)),
        )


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
    # The optimizers whose turns were skipped, if other turns of the step were not.
    skipped_alone: tuple[str, ...] = ()


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
