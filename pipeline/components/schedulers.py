"""Schedulers: how learning rates change during the training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from pipeline.components.losses import Losses
from pipeline.components.stateful import Stateful, load_json, save_json
from pipeline.serialization.torch_files import load_tensors


class BaseScheduler(Stateful):
    """The contract of a scheduler. This base leaves the learning rates alone: override what the policy needs.

    ``initialize`` is called once in the life of an experiment, not at a resume. The others are called in every epoch
    from ``scheduler_start_epoch`` on. All are called on every rank.
    """

    def initialize(self, start_epoch: int) -> None:
        """Called before the first epoch, with the first epoch in which the scheduler acts."""

    def before_train_epoch(self, num_steps: int) -> None:
        """Called before the first step of an epoch of ``num_steps`` steps."""

    def after_train_step(self, step: int) -> None:
        """Called after each step with its number in the epoch, which starts at 1."""

    def after_train_epoch(self) -> None:
        """Called after the last step of an epoch."""

    def after_evaluation(self, losses: Losses) -> None:
        """Called when the training continues after an evaluation, before ``before_train_epoch``; not after the last.

        The evaluation's values are the last of ``epoch_means`` of ``losses["val"]``.
        """


class TorchScheduler(BaseScheduler):
    """Adapts a scheduler of ``torch.optim.lr_scheduler``, stepped once per ``"step"`` or per ``"epoch"``.

    ReduceLROnPlateau is stepped after each evaluation instead, with the value of ``register``. A scheduler changes the
    rates of the groups that it was created with: a group that a hook adds later keeps its own.
    """

    def __init__(self, torch_scheduler: LRScheduler, per: str = "epoch", register: str | None = None) -> None:
        if per not in ("step", "epoch"):
            raise ValueError(f'per must be "step" or "epoch", but is {per!r} instead.')
        needs_register = isinstance(torch_scheduler, ReduceLROnPlateau)
        if needs_register and register is None:
            raise ValueError(
                "ReduceLROnPlateau follows a register of evaluations, but none is named; "
                'write TorchScheduler(ReduceLROnPlateau(…), register="loss").'
            )
        if register is not None and not needs_register:
            kind = type(torch_scheduler).__name__
            raise ValueError(f"register is for ReduceLROnPlateau, but {kind} follows steps or epochs alone.")
        self.torch_scheduler = torch_scheduler
        self.per = per
        self.register = register
        # True from the first epoch until the scheduler's own first epoch.
        self.is_waiting = False
        self._num_groups = len(torch_scheduler.optimizer.param_groups)

    def initialize(self, start_epoch: int) -> None:
        # torch's schedulers set their first learning rate when they are created. Undo it until the scheduler acts.
        self.is_waiting = start_epoch > 1 and self.register is None
        if self.is_waiting:
            for group in self.torch_scheduler.optimizer.param_groups:
                group["lr"] = group["initial_lr"]

    def before_train_epoch(self, num_steps: int) -> None:
        if self.is_waiting:
            # The scheduler's first epoch: apply the rates that ``initialize`` has undone.
            self.is_waiting = False
            rates = self.torch_scheduler.get_last_lr()
            groups = self.torch_scheduler.optimizer.param_groups[: self._num_groups]
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def after_train_step(self, step: int) -> None:
        if self.per == "step" and self.register is None:
            with self._known_groups():
                self.torch_scheduler.step()

    def after_train_epoch(self) -> None:
        if self.per == "epoch" and self.register is None:
            with self._known_groups():
                self.torch_scheduler.step()

    def after_evaluation(self, losses: Losses) -> None:
        if self.register is not None:
            with self._known_groups():
                # A value that is not a number is never an improvement: it compares as false.
                value = losses["val"][self.register].epoch_means[-1]
                self.torch_scheduler.step(value)  # type: ignore[arg-type]

    @contextmanager
    def _known_groups(self) -> Iterator[None]:
        """Show the scheduler those groups alone that it was created with; it has no base rates of others."""
        optimizer = self.torch_scheduler.optimizer
        groups = optimizer.param_groups
        optimizer.param_groups = groups[: self._num_groups]
        try:
            yield
        finally:
            optimizer.param_groups = groups

    def save(self, folder: Path) -> None:
        with (folder / "scheduler.pt").open("wb") as file:
            torch.save({"is_waiting": self.is_waiting, "scheduler": self.torch_scheduler.state_dict()}, file)

    def load(self, folder: Path) -> None:
        state = load_tensors(folder / "scheduler.pt")
        self.is_waiting = state["is_waiting"]
        self.torch_scheduler.load_state_dict(state["scheduler"])


class WarmupScheduler(BaseScheduler):
    """Raises the learning rates linearly, step by step, to their full value; then the scheduler ``then`` acts.

    The warm-up takes ``warmup_epochs``, which may be a fraction, or ``warmup_steps``. The first step uses
    ``start_factor`` times the full rate. ``then`` may be any scheduler, also another WarmupScheduler, to build longer
    sequences. After a warm-up of epochs it acts from the next whole epoch on, after one of steps from the next step on.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_epochs: float | None = None,
        then: BaseScheduler | None = None,
        start_factor: float = 0.1,
        *,
        warmup_steps: int | None = None,
    ) -> None:
        if (warmup_epochs is None) == (warmup_steps is None):
            raise ValueError("A warm-up must have warmup_epochs or warmup_steps, and not both.")
        self.optimizer = optimizer
        self.warmup_epochs = warmup_epochs
        self.warmup_steps = warmup_steps
        self.start_factor = start_factor
        self.then = then or BaseScheduler()
        # ``initial_lr`` first: a torch scheduler in ``then`` may have changed the rates when it was created.
        self.full_rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        self.num_epochs = 0
        self.num_steps = 1
        # Steps of the warm-up that were taken, counted over the epochs.
        self.num_taken = 0

    @property
    def is_warming_up(self) -> bool:
        if self.warmup_epochs is None:
            return self.num_taken < (self.warmup_steps or 0)
        return self.num_epochs < self.warmup_epochs

    def initialize(self, start_epoch: int) -> None:
        if self.warmup_epochs is None:
            # As if it began in a later epoch: ``before_train_epoch`` is called when its first step has come.
            self.then.initialize(start_epoch + (1 if self.is_warming_up else 0))
        else:
            # ``then`` acts in whole epochs, so it waits for the end of an epoch that is partly warm-up.
            self.then.initialize(start_epoch + math.ceil(self.warmup_epochs))

    def before_train_epoch(self, num_steps: int) -> None:
        self.num_steps = num_steps
        if self.is_warming_up:
            self._set_rates(0)
        else:
            self.then.before_train_epoch(num_steps)

    def after_train_step(self, step: int) -> None:
        if not self.is_warming_up:
            self.then.after_train_step(step)
            return
        self.num_taken += 1
        self._set_rates(step)
        if self.warmup_epochs is None and not self.is_warming_up:
            self.then.before_train_epoch(self.num_steps)

    def after_train_epoch(self) -> None:
        # Asked before counting: the epoch that ends here decides, not the next one.
        was_warming_up = self.is_warming_up
        self.num_epochs += 1
        if not was_warming_up:
            self.then.after_train_epoch()

    def after_evaluation(self, losses: Losses) -> None:
        # An author's own scheduler need not have the method.
        act = getattr(self.then, "after_evaluation", None)
        if act is not None and not self.is_warming_up:
            act(losses)

    def _set_rates(self, step: int) -> None:
        if self.warmup_epochs is None:
            completed = self.num_taken / (self.warmup_steps or 1)
        else:
            # At most 1: a warm-up of a fraction of an epoch ends before the epoch does.
            completed = min(1.0, (self.num_epochs + step / max(1, self.num_steps)) / self.warmup_epochs)
        factor = self.start_factor + (1 - self.start_factor) * completed
        # A group that a hook has added has no part in the warm-up.
        for group, rate in zip(self.optimizer.param_groups, self.full_rates, strict=False):
            group["lr"] = rate * factor

    def save(self, folder: Path) -> None:
        names = ["num_epochs", "num_steps", "full_rates"]
        if self.warmup_epochs is None:
            names.append("num_taken")
        save_json(folder, {name: getattr(self, name) for name in names})
        (folder / "then").mkdir()
        self.then.save(folder / "then")

    def load(self, folder: Path) -> None:
        for name, value in load_json(folder).items():
            setattr(self, name, value)
        self.then.load(folder / "then")
