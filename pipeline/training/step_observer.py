"""An observer of training steps: sees each step and batch, and changes nothing."""

from __future__ import annotations

from typing import Any

import torch

from pipeline.training.engines.base import StepOutcome
from pipeline.training.step_plan import BatchRef


class StepObserver:
    """Called at each step and batch of this rank; this one does not look."""

    def step_begins(self, epoch: int, step: int) -> None:
        """Called before anything of a step has happened; steps count from 1."""

    def batch_is_loaded(self, position: int, ref: BatchRef, batch: Any) -> None:
        """Called with a batch on the device, before the module transform sees it."""

    def losses_are_known(self, position: int, losses: dict[str, torch.Tensor]) -> None:
        """Called with the losses of the same batch, one value per item."""

    def step_ends(self, outcome: StepOutcome) -> None:
        """Called when the weights have been updated, or not."""
