"""Early stoppers: whether the latest evaluation is the best so far, and when the experiment ends."""

from __future__ import annotations

import math
from pathlib import Path

from pipeline.components.losses import Losses, WeighsLosses, num_finished_epochs, weighted_loss
from pipeline.components.stateful import Stateful, load_json, save_json


class BaseEarlyStopper(Stateful):
    """The contract of an early stopper. This base never improves and never stops: override all three methods."""

    def update(self, losses: Losses, loss_weighter: WeighsLosses) -> None:
        """Take the latest evaluation into account; called after each one, epoch 0 included."""

    def improvement(self) -> bool:
        """Return whether the latest evaluation is the best so far; the ``best`` pool follows it."""
        return False

    def early_stop(self) -> bool:
        """Return whether the experiment ends here."""
        return False


class _PatientEarlyStopper(BaseEarlyStopper):
    """Stops at a limit, or when a value has not improved for ``patience`` evaluations in a row.

    ``max_epochs``: the last epoch in any case. ``max_steps``: the last step, counted over all epochs; it may lie inside
    an epoch, which then ends there. None sets no limit. settings/training.json may have limits as well, and the first
    one that is reached counts. ``patience``: None never stops early. ``startup``: epochs at the beginning in which
    evaluations without improvement do not count. ``abs_tol``, ``rel_tol``: an improvement must be larger than
    ``abs_tol`` and than ``rel_tol`` times the best value. A value that is not finite is never an improvement.
    """

    direction = "min"

    def __init__(
        self,
        max_epochs: int | None = None,
        *,
        patience: int | None = None,
        startup: int = 0,
        abs_tol: float = 0.0,
        rel_tol: float = 0.0,
        max_steps: int | None = None,
    ) -> None:
        if max_steps is not None and max_steps < 1:
            raise ValueError(f"max_steps must be 1 or more, but is {max_steps} instead.")
        self.max_epochs = max_epochs
        # Kept for the pipeline, which plans the last epoch by it.
        self.max_steps = max_steps
        self.patience = patience
        self.startup = startup
        self.abs_tol = abs_tol
        self.rel_tol = rel_tol
        self.epoch = 0
        self.num_evaluations = 0
        self.num_waiting = 0
        self.best: float | None = None
        self.best_epoch: int | None = None
        self.improved = False

    def value(self, losses: Losses, loss_weighter: WeighsLosses) -> float | None:
        """Return the value of the latest evaluation, or None if nothing was evaluated."""
        raise TypeError(f"{type(self).__name__} must define value(losses, loss_weighter).")

    def update(self, losses: Losses, loss_weighter: WeighsLosses) -> None:
        self.epoch = num_finished_epochs(losses)
        num_evaluations = max((len(record.epochs) for record in losses["val"].values()), default=0)
        self.improved = False
        # With evaluation_interval 0, updates come after training epochs: there is nothing new to judge.
        if num_evaluations <= self.num_evaluations:
            return
        self.num_evaluations = num_evaluations
        value = self.value(losses, loss_weighter)
        self.improved = value is not None and self._is_better(value)
        if self.improved:
            self.best = value
            self.best_epoch = self.epoch
            self.num_waiting = 0
        elif self.epoch > self.startup:
            self.num_waiting += 1

    def _is_better(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self.best is None:
            return True
        margin = max(self.abs_tol, self.rel_tol * abs(self.best))
        gain = self.best - value if self.direction == "min" else value - self.best
        return gain > margin

    def improvement(self) -> bool:
        return self.improved

    def early_stop(self) -> bool:
        out_of_epochs = self.max_epochs is not None and self.epoch >= self.max_epochs
        out_of_patience = self.patience is not None and self.num_waiting >= self.patience
        return out_of_epochs or out_of_patience

    def save(self, folder: Path) -> None:
        # Only what changes: the arguments come from the pymodule, so that an accepted edit of it takes effect.
        names = ("epoch", "num_evaluations", "num_waiting", "best", "best_epoch", "improved")
        save_json(folder, {name: getattr(self, name) for name in names})

    def load(self, folder: Path) -> None:
        for name, value in load_json(folder).items():
            setattr(self, name, value)


class WeightedLossEarlyStopper(_PatientEarlyStopper):
    """Judges by the weighted sum of the optimised registers' validation means."""

    def value(self, losses: Losses, loss_weighter: WeighsLosses) -> float | None:
        return weighted_loss(losses, loss_weighter)


class RegisterEarlyStopper(_PatientEarlyStopper):
    """Judges by the validation mean of one register, in the ``direction`` of its settings."""

    def __init__(
        self,
        register: str,
        max_epochs: int | None = None,
        *,
        patience: int | None = None,
        startup: int = 0,
        abs_tol: float = 0.0,
        rel_tol: float = 0.0,
        max_steps: int | None = None,
    ) -> None:
        super().__init__(
            max_epochs, patience=patience, startup=startup, abs_tol=abs_tol, rel_tol=rel_tol, max_steps=max_steps
        )
        self.register = register

    def value(self, losses: Losses, loss_weighter: WeighsLosses) -> float | None:
        record = losses["val"][self.register]
        # A setting of the register, so it is not known before there are losses.
        self.direction = record.direction
        return record.epoch_means[-1] if record.epoch_means else None
