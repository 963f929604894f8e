"""Gradients: accumulated locally, reduced once per step, applied or skipped by all ranks together."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from pipeline.experiment.assembly import Experiment
from pipeline.runtime.processes import Processes

_NUM_WISHES = 3


@dataclass(frozen=True)
class Wishes:
    """What this rank would like all ranks to do after the step."""

    stop: bool = False
    commit: bool = False


@dataclass(frozen=True)
class Verdict:
    """What all ranks know after a step, without having asked each other again."""

    skipped: bool
    overflowed: bool
    stop: bool
    commit: bool
    norms: dict[str, float]
    norm: float


class _Carry(torch.autograd.Function):
    """Gives ``signals`` a message as its gradient.

    Autograd runs nodes in the reverse order of their creation, so what is applied before the forward pass asks
    for its message after all other gradients of the batch are there.
    """

    @staticmethod
    def forward(ctx: Any, signals: torch.Tensor, message: Callable[[], torch.Tensor]) -> torch.Tensor:
        ctx.message = message
        return signals.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.message(), None


class _Touch(torch.autograd.Function):
    """Makes parameters part of a graph without giving them a gradient.

    DDP waits for every parameter; one that a batch does not use reports as soon as its part of this node has run.
    """

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.count = len(parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, ...]:
        return (None,) * int(ctx.count)


class StepModule(nn.Module):
    """All trained modules as one, so that one engine reduces their gradients together.

    ``signals`` is no weight: its gradient carries, in the same reduction, whether any rank met a loss that is
    not finite, was asked to stop or wants a commit, and which parameters any rank has used. It is registered
    first because DDP reduces in the reverse order: everything else may be on its way by then.
    """

    def __init__(self, modules: list[nn.Module], device: torch.device) -> None:
        super().__init__()
        trained = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
        self.weights = list(dict.fromkeys(trained))
        self.signals = nn.Parameter(torch.zeros(_NUM_WISHES + len(self.weights), device=device))
        self.trained = nn.ModuleList(modules)

    def forward(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        return compute()


class GradientEngine:
    """One step's gradients with torch's DistributedDataParallel, or without it in a single process.

    DDP rebuilds its buckets after the first backward pass in the order in which gradients became ready, so a
    resumed process would add its first step's gradients in another order than one that never stopped. A rehearsal
    settles the order before the first step.
    """

    def __init__(self, experiment: Experiment, processes: Processes) -> None:
        self._experiment, self._processes = experiment, processes
        training = experiment.settings.training
        self._clip_norm = training.grad_clip_norm
        self._modules = StepModule(list(experiment.components.trained_modules.values()), processes.device)
        self._buffers = sorted(self._modules.buffers(), key=lambda buffer: -buffer.element_size())
        self._parameters = {
            name: [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for name, optimizer in experiment.optimizers.items()
        }
        self.scaler = torch.amp.GradScaler(processes.device.type, enabled=training.precision == "fp16")
        self._engine: nn.Module = self._modules
        if processes.world_size > 1:
            self._engine = DistributedDataParallel(self._modules, broadcast_buffers=False, gradient_as_bucket_view=True)
            self._rehearse()

    def _rehearse(self) -> None:
        """Let every parameter become ready once, from last to first, with no gradient at all."""
        in_order = [self._modules.signals, *self._modules.weights]
        touch = _Touch.apply
        self._engine(lambda: torch.stack([touch(parameter) for parameter in in_order]).sum()).backward()  # type: ignore[no-untyped-call]
        self._forget()

    def share_buffers(self) -> None:
        """Give every rank rank zero's buffers, so that nothing depends on what a lost process had seen."""
        if self._processes.world_size == 1 or not self._buffers:
            return
        # Wider types come first, so that every slice of the bytes is aligned for its type.
        flat = torch.cat([buffer.reshape(-1).view(torch.uint8) for buffer in self._buffers])
        self._processes.send_from_rank_zero(flat)
        sizes = [buffer.numel() * buffer.element_size() for buffer in self._buffers]
        for buffer, part in zip(self._buffers, flat.split(sizes), strict=True):
            buffer.copy_(part.view(buffer.dtype).view_as(buffer))

    def backward(self, compute: Callable[[], tuple[torch.Tensor, torch.Tensor]], wishes: Wishes | None) -> None:
        """Add the gradients of one batch; the rank's last batch of a step brings its wishes and is reduced.

        ``compute`` returns the batch's share of the step's loss and a sum that is finite if all losses are.
        """

        def with_signals() -> torch.Tensor:
            healths: list[torch.Tensor] = []
            message = lambda: self._message(healths[0], wishes)  # noqa: E731
            carried = _Carry.apply(self._modules.signals, message)  # type: ignore[no-untyped-call]
            loss, health = compute()
            healths.append(health)
            # DDP averages over the ranks; the loss is already normalised by the items of all ranks.
            total: torch.Tensor = loss * self._processes.world_size + carried
            if wishes is not None:
                total = total + _Touch.apply(*self._modules.weights)  # type: ignore[no-untyped-call]
            return total

        with self._no_sync() if wishes is None else contextlib.nullcontext():
            self.scaler.scale(self._engine(with_signals)).backward()

    def _message(self, health: torch.Tensor, wishes: Wishes | None) -> torch.Tensor:
        """Return the signals' gradient; zero times a sum that is finite is zero, and NaN otherwise."""
        if wishes is None:
            message = torch.zeros_like(self._modules.signals)
        else:
            used = [parameter.grad is not None for parameter in self._modules.weights]
            message = torch.tensor([0.0, wishes.stop, wishes.commit, *used], device=self._processes.device)
        message[0] = health * 0
        return message

    def join_without_batch(self, wishes: Wishes) -> None:
        """Take part in the reduction of a step in which this rank has no batch."""
        zero = torch.zeros((), device=self._processes.device)
        self.backward(lambda: (zero, zero), wishes)

    def _no_sync(self) -> Any:
        engine = self._engine
        return engine.no_sync() if isinstance(engine, DistributedDataParallel) else contextlib.nullcontext()

    def finish_step(self) -> Verdict:
        """Apply the reduced gradients, or skip the step if anything was not finite; the same on every rank."""
        optimizers = self._experiment.optimizers.values()
        if self.scaler.is_enabled():
            for optimizer in optimizers:
                self.scaler.unscale_(optimizer)
        verdict = self._judge()
        if not verdict.skipped:
            self._clip(verdict.norm)
            for optimizer in optimizers:
                self.scaler.step(optimizer)
        if self.scaler.is_enabled():
            self.scaler.update()
        self._forget()
        return verdict

    def _judge(self) -> Verdict:
        signals = self._modules.signals.grad
        assert signals is not None
        norms = [self._norm(parameters) for parameters in self._parameters.values()]
        # The one moment per step at which the host waits for the device.
        known = torch.cat([signals, torch.stack(norms).to(signals.dtype)]).tolist()
        health, stop, commit = known[:_NUM_WISHES]
        used, values = known[_NUM_WISHES : -len(norms)], known[-len(norms) :]
        self._forget_unused(used)
        is_finite = all(math.isfinite(value) for value in values)
        return Verdict(
            skipped=not (is_finite and health == 0),
            overflowed=self.scaler.is_enabled() and health == 0 and not is_finite,
            stop=stop > 0,
            commit=commit > 0,
            norms=dict(zip(self._parameters, values, strict=True)),
            norm=math.hypot(*values),
        )

    def _norm(self, parameters: list[nn.Parameter]) -> torch.Tensor:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return get_total_norm(gradients) if gradients else torch.zeros((), device=self._processes.device)

    def _forget_unused(self, used: list[float]) -> None:
        """Take the zeros away that DDP gives to parameters which no rank has used: optimizers must not see them."""
        if not all(used):
            for parameter, count in zip(self._modules.weights, used, strict=True):
                parameter.grad = parameter.grad if count else None

    def _clip(self, norm: float) -> None:
        if self._clip_norm is not None and norm > self._clip_norm:
            for parameters in self._parameters.values():
                clip_grads_with_norm_(parameters, self._clip_norm, torch.tensor(norm, device=self._processes.device))

    def _forget(self) -> None:
        self._modules.signals.grad = None
        for optimizer in self._experiment.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
