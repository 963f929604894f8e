"""Hooks: an author's code at moments of the training, for what no other pymodule does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.optim import Optimizer

from pipeline.components.losses import Losses
from pipeline.components.position import Position
from pipeline.components.stateful import Stateful


@dataclass(frozen=True)
class TrainingState:
    """What a hook sees, the same on every rank.

    ``modules`` are those that are trained, and ``losses`` are the recorded ones, as loss weighters see them.
    """

    modules: Mapping[str, nn.Module]
    optimizers: Mapping[str, Optimizer]
    position: Position
    losses: Losses


class BaseHook(Stateful):
    """The contract of a hook: override the moments that it needs. Each is called on every rank, without gradients.

    A hook may change values in place, requires_grad flags and learning rates, and add param groups with a ``name``. It
    must leave the set, shapes and types of parameters and buffers as they are. Overriding ``after_train_step`` costs
    one small all-reduce per step, because the losses of the step must then be summed over the ranks.
    """

    def at_start(self, state: TrainingState) -> None:
        """Called once in the life of an experiment, before its first commit; not at a resume."""

    def before_train_epoch(self, state: TrainingState) -> None:
        """Called before the first step of an epoch, after the schedulers."""

    def after_train_step(self, state: TrainingState) -> None:
        """Called after each step, skipped ones too; the step's values are the last of ``step_means``."""

    def after_train_epoch(self, state: TrainingState) -> None:
        """Called after the last step of an epoch; the epoch's values are the last of ``epoch_means``."""

    def after_evaluation(self, state: TrainingState) -> None:
        """Called when the training continues after an evaluation, before ``before_train_epoch``; not after the last."""


# The methods of a hook that take a state, in the order in which they are called.
MOMENTS = ("at_start", "before_train_epoch", "after_train_step", "after_train_epoch", "after_evaluation")


def is_overridden(hook: object, moment: str) -> bool:
    """Return whether a hook acts at a moment; it need not inherit from BaseHook."""
    method = getattr(hook, moment, None)
    return method is not None and getattr(method, "__func__", method) is not getattr(BaseHook, moment)


class UnfreezeAt(BaseHook):
    """Trains parameters of a module from the beginning of an epoch on; they must be frozen in the module's file.

    Of several ``patterns`` one must match the name of a parameter, ``*`` stands for anything; without any, all do. With
    ``optimizer``, which parameters that are in no optimizer need, they become a param group of it, with the learning
    rate ``lr``, or the optimizer's own, and the name ``group``.
    """

    def __init__(
        self,
        epoch: int,
        module: str,
        *patterns: str,
        optimizer: str | None = None,
        lr: float | None = None,
        group: str | None = None,
    ) -> None:
        if epoch < 1:
            raise ValueError(f"epoch must be 1 or more, but is {epoch} instead.")
        if optimizer is None and (lr is not None or group is not None):
            raise ValueError("lr and group are of a new param group, which needs optimizer.")
        self.epoch = epoch
        self.module = module
        self.patterns = patterns or ("*",)
        self.optimizer = optimizer
        self.lr = lr
        self.group = group or f"{module}_from_{epoch}"

    def select(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters of the module that are unfrozen, by name."""
        return {
            name: parameter
            for name, parameter in module.named_parameters()
            if any(fnmatchcase(name, pattern) for pattern in self.patterns)
        }

    def before_train_epoch(self, state: TrainingState) -> None:
        if state.position.epoch != self.epoch:
            return
        parameters = list(self.select(state.modules[self.module]).values())
        for parameter in parameters:
            parameter.requires_grad_(True)
        if self.optimizer is not None:
            rate = {} if self.lr is None else {"lr": self.lr}
            state.optimizers[self.optimizer].add_param_group({"params": parameters, "name": self.group, **rate})
