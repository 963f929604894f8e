"""Schedulers: how learning rates change."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from pipeline.components.stateful import Stateful, load_json, save_json
from pipeline.serialization.torch_files import load_tensors


class BaseScheduler(Stateful):
    """Leaves the learning rates alone; override what the policy needs.

    ``initialize`` is called once in the life of an experiment, the others in every epoch from
    ``scheduler_start_epoch`` on, on every rank.
    """

    def initialize(self, start_epoch: int) -> None:
        """Called before the first epoch, with the epoch from which on the scheduler acts."""

    def before_train_epoch(self, num_steps: int) -> None:
        """Called before the first step of an epoch of ``num_steps`` steps."""

    def after_train_step(self, step: int) -> None:
        """Called after each step with its number, from 1."""

    def after_train_epoch(self) -> None:
        """Called after the last step of an epoch."""


class TorchScheduler(BaseScheduler):
    """Adapts any class of ``torch.optim.lr_scheduler``, stepped once per ``"step"`` or ``"epoch"``."""

    def __init__(self, torch_scheduler: LRScheduler, per: str = "epoch") -> None:
        if per not in ("step", "epoch"):
            raise ValueError(f'per must be "step" or "epoch", but is {per!r} instead.')
        if isinstance(torch_scheduler, ReduceLROnPlateau):
            raise ValueError("ReduceLROnPlateau needs a metric, which schedulers do not see; write a BaseScheduler.")
        self.torch_scheduler = torch_scheduler
        self.per = per
        self.is_waiting = False

    def initialize(self, start_epoch: int) -> None:
        """Undo the rate that torch's schedulers set when they are created, until their time has come."""
        self.is_waiting = start_epoch > 1
        for group in self.torch_scheduler.optimizer.param_groups if self.is_waiting else ():
            group["lr"] = group["initial_lr"]

    def before_train_epoch(self, num_steps: int) -> None:
        if self.is_waiting:
            self.is_waiting = False
            rates = self.torch_scheduler.get_last_lr()
            for group, rate in zip(self.torch_scheduler.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def after_train_step(self, step: int) -> None:
        if self.per == "step":
            self.torch_scheduler.step()

    def after_train_epoch(self) -> None:
        if self.per == "epoch":
            self.torch_scheduler.step()

    def save(self, folder: Path) -> None:
        with (folder / "scheduler.pt").open("wb") as file:
            torch.save({"is_waiting": self.is_waiting, "scheduler": self.torch_scheduler.state_dict()}, file)

    def load(self, folder: Path) -> None:
        state = load_tensors(folder / "scheduler.pt")
        self.is_waiting = state["is_waiting"]
        self.torch_scheduler.load_state_dict(state["scheduler"])


class WarmupScheduler(BaseScheduler):
    """Raises the learning rates step by step to their full value, then hands over to another scheduler.

    ``warmup_epochs`` may be a fraction of an epoch; the first step uses ``start_factor`` times the full
    rate. Put a second WarmupScheduler or any other scheduler behind it to build longer sequences.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_epochs: float,
        then: BaseScheduler | None = None,
        start_factor: float = 0.1,
    ) -> None:
        self.optimizer = optimizer
        self.warmup_epochs = warmup_epochs
        self.start_factor = start_factor
        self.then: Any = then or BaseScheduler()
        # A torch scheduler behind this one may have lowered the rates already when it was created.
        self.full_rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        self.num_epochs = 0
        self.num_steps = 1

    @property
    def is_warming_up(self) -> bool:
        return self.num_epochs < self.warmup_epochs

    def initialize(self, start_epoch: int) -> None:
        self.then.initialize(start_epoch + math.ceil(self.warmup_epochs))

    def before_train_epoch(self, num_steps: int) -> None:
        self.num_steps = num_steps
        if self.is_warming_up:
            self._set_rates(0)
        else:
            self.then.before_train_epoch(num_steps)

    def after_train_step(self, step: int) -> None:
        if self.is_warming_up:
            self._set_rates(step)
        else:
            self.then.after_train_step(step)

    def after_train_epoch(self) -> None:
        was_warming_up = self.is_warming_up
        self.num_epochs += 1
        if not was_warming_up:
            self.then.after_train_epoch()

    def _set_rates(self, step: int) -> None:
        done = min(1.0, (self.num_epochs + step / self.num_steps) / self.warmup_epochs)
        factor = self.start_factor + (1 - self.start_factor) * done
        for group, rate in zip(self.optimizer.param_groups, self.full_rates, strict=True):
            group["lr"] = rate * factor

    def save(self, folder: Path) -> None:
        save_json(folder, {"num_epochs": self.num_epochs, "num_steps": self.num_steps, "full_rates": self.full_rates})
        (folder / "then").mkdir()
        self.then.save(folder / "then")

    def load(self, folder: Path) -> None:
        for name, value in load_json(folder).items():
            setattr(self, name, value)
        self.then.load(folder / "then")
