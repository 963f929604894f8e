"""Checkpoint savers: which epochs keep their weights in a pool ``epoch_<n>``."""

from __future__ import annotations

from pipeline.components.early_stoppers import BaseEarlyStopper
from pipeline.components.losses import Losses, WeighsLosses, num_finished_epochs
from pipeline.components.stateful import Stateful


class BaseCheckpointSaver(Stateful):
    """Keeps no epoch pools; ``init``, ``last`` and ``best`` are kept in any case.

    ``num_to_keep`` limits the number of ``epoch_<n>`` pools; the oldest is removed first (None: keep all).
    """

    num_to_keep: int | None = None

    def update(self, losses: Losses, loss_weighter: WeighsLosses, early_stopper: BaseEarlyStopper) -> None:
        """Take the latest evaluation into account; called after the early stopper's ``update``."""

    def save_checkpoints(self) -> bool:
        """Return whether this epoch keeps its weights as ``epoch_<n>``."""
        return False


class PeriodicCheckpointSaver(BaseCheckpointSaver):
    """Keeps every ``every_epochs``-th epoch, if it is evaluated."""

    def __init__(self, every_epochs: int = 1, num_to_keep: int | None = None) -> None:
        if every_epochs < 1:
            raise ValueError(f"every_epochs must be 1 or more, but is {every_epochs} instead.")
        self.every_epochs = every_epochs
        self.num_to_keep = num_to_keep
        # Not part of the saved state: ``update`` sets it before every call of ``save_checkpoints``.
        self._is_due = False

    def update(self, losses: Losses, loss_weighter: WeighsLosses, early_stopper: BaseEarlyStopper) -> None:
        epoch = num_finished_epochs(losses)
        # Epoch 0 is the evaluation before the training; its weights are the pool ``init``.
        self._is_due = epoch > 0 and epoch % self.every_epochs == 0

    def save_checkpoints(self) -> bool:
        return self._is_due


class ImprovementCheckpointSaver(BaseCheckpointSaver):
    """Keeps every epoch that the early stopper calls an improvement."""

    def __init__(self, num_to_keep: int | None = None) -> None:
        self.num_to_keep = num_to_keep
        self._is_due = False

    def update(self, losses: Losses, loss_weighter: WeighsLosses, early_stopper: BaseEarlyStopper) -> None:
        self._is_due = num_finished_epochs(losses) > 0 and early_stopper.improvement()

    def save_checkpoints(self) -> bool:
        return self._is_due
