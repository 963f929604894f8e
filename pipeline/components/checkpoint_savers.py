"""Checkpoint savers: which epochs keep their weights in a pool of their own."""

from __future__ import annotations

from typing import Any

from pipeline.components.losses import Losses, WeighsLosses, num_finished_epochs
from pipeline.components.stateful import Stateful


class BaseCheckpointSaver(Stateful):
    """Keeps no epoch pools; ``last`` and ``best`` are kept in any case.

    ``num_to_keep`` limits the number of ``epoch_<n>`` pools; the oldest goes first (None: keep all).
    """

    num_to_keep: int | None = None

    def update(self, losses: Losses, loss_weighter: WeighsLosses, early_stopper: Any) -> None:
        """Take the latest evaluation into account; called after the early stopper's update."""

    def save_checkpoints(self) -> bool:
        """Return whether this epoch keeps its weights as ``epoch_<n>``."""
        return False


class PeriodicCheckpointSaver(BaseCheckpointSaver):
    """Keeps every ``every_epochs``-th epoch."""

    def __init__(self, every_epochs: int = 1, num_to_keep: int | None = None) -> None:
        if every_epochs < 1:
            raise ValueError(f"every_epochs must be 1 or more, but is {every_epochs} instead.")
        self.every_epochs = every_epochs
        self.num_to_keep = num_to_keep
        self._is_due = False

    def update(self, losses: Losses, loss_weighter: WeighsLosses, early_stopper: Any) -> None:
        epoch = num_finished_epochs(losses)
        self._is_due = epoch > 0 and epoch % self.every_epochs == 0

    def save_checkpoints(self) -> bool:
        return self._is_due


class ImprovementCheckpointSaver(BaseCheckpointSaver):
    """Keeps every epoch that the early stopper calls an improvement."""

    def __init__(self, num_to_keep: int | None = None) -> None:
        self.num_to_keep = num_to_keep
        self._is_due = False

    def update(self, losses: Losses, loss_weighter: WeighsLosses, early_stopper: Any) -> None:
        self._is_due = num_finished_epochs(losses) > 0 and early_stopper.improvement()

    def save_checkpoints(self) -> bool:
        return self._is_due
