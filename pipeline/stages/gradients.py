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
from torch.nn.utils import clip_grads_with_norm_

from pipeline.experiment.assembly import Experiment
from pipeline.runtime.processes import Processes
from pipeline.stages.buffers import BatchNormStatistics, SharedBuffers

_NUM_WISHES = 3
Compute = Callable[[], tuple[list[torch.Tensor], list[torch.Tensor]]]


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
    """The weights of all trained modules as one module, so that one engine reduces their gradients together.

    ``signals`` is no weight: its gradient carries, in the same reduction, whether any rank met a loss that is
    not finite, was asked to stop or wants a commit, and which parameters any rank has used. It is registered
    first because DDP reduces in the reverse order: everything else may be on its way by then.

    A hook replaces its gradient by the message. Autograd runs nodes in the reverse order of their creation, so a
    forward pass that begins with ``signals`` asks for the message when all its other gradients are there.
    """

    def __init__(self, modules: list[nn.Module], device: torch.device) -> None:
        super().__init__()
        trained = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
        weights = list(dict.fromkeys(trained))
        self.signals = nn.Parameter(torch.zeros(_NUM_WISHES + len(weights), device=device))
        self.weights = nn.ParameterList(weights)

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
        modules = list(experiment.components.trained_modules.values())
        self._modules = StepModule(modules, processes.device)
        self._weights = list(self._modules.weights)
        self._statistics = BatchNormStatistics(modules, processes)
        self.buffers = SharedBuffers(modules, self._statistics, processes)
        self._parameters = {
            name: [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for name, optimizer in experiment.optimizers.items()
        }
        self.scaler = torch.amp.GradScaler(processes.device.type, enabled=training.precision == "fp16")
        self._constants: dict[tuple[float, ...], torch.Tensor] = {}
        self._said: tuple[Wishes | None, list[torch.Tensor]] = None, []
        self._engine: nn.Module = self._modules
        if processes.world_size > 1:
            self._engine = DistributedDataParallel(self._modules, gradient_as_bucket_view=True)
            self._rehearse()
        self._modules.signals.register_hook(self._message)

    def _rehearse(self) -> None:
        """Let every parameter become ready once, from last to first, with no gradient at all."""
        in_order = [self._modules.signals, *self._weights]
        touch = _Touch.apply
        self._engine(lambda: torch.stack([touch(parameter) for parameter in in_order]).sum()).backward()  # type: ignore[no-untyped-call]
        self._forget()

    def begin_step(self) -> None:
        """Let every rank start from the same buffers."""
        self.buffers.share()
        self._statistics.begin_step()

    @property
    def loss_scale(self) -> int:
        """DDP averages over the ranks, but a step's loss is already normalised by the items of all ranks."""
        return self._processes.world_size

    def backward(self, compute: Compute, wishes: Wishes | None) -> None:
        """Add the gradients of one batch; the rank's last batch of a step brings its wishes and is reduced.

        ``compute`` returns the batch's terms of the step's loss and the sums that must be finite.
        """

        def with_signals() -> torch.Tensor:
            carried = self._modules.signals[0]
            terms, sums = compute()
            self._said = wishes, sums
            if wishes is not None and self._processes.world_size > 1:
                terms.append(_Touch.apply(*self._weights))  # type: ignore[no-untyped-call]
            return sum(terms, carried)

        with self._no_sync() if wishes is None else contextlib.nullcontext():
            self.scaler.scale(self._engine(with_signals)).backward()
        self._statistics.after_batch()

    def _message(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the signals' gradient; adding a sum zero times changes nothing unless it is not finite."""
        wishes, sums = self._said
        if wishes is None:
            message = torch.zeros_like(self._modules.signals)
        else:
            used = tuple([parameter.grad is not None for parameter in self._weights])
            message = self._constant((0.0, wishes.stop, wishes.commit, *used)).clone()
        for total in sums:
            message[0].add_(total, alpha=0)
        return message

    def _constant(self, values: tuple[float, ...]) -> torch.Tensor:
        """Return a message that was sent before, or make it: almost all steps say the same."""
        if values not in self._constants:
            self._constants = {values: torch.tensor(values, device=self._processes.device)}
        return self._constants[values]

    def join_without_batch(self, wishes: Wishes) -> None:
        """Take part in the reduction of a step in which this rank has no batch."""
        self.backward(lambda: ([], []), wishes)

    def _no_sync(self) -> Any:
        engine = self._engine
        return engine.no_sync() if isinstance(engine, DistributedDataParallel) else contextlib.nullcontext()

    def finish_step(self) -> Verdict:
        """Apply the reduced gradients, or skip the step if anything was not finite; the same on every rank."""
        named = self._experiment.optimizers.items()
        used = [one for name, one in named if any(own.grad is not None for own in self._parameters[name])]
        if self.scaler.is_enabled():
            for optimizer in used:
                self.scaler.unscale_(optimizer)
        verdict = self._judge()
        if not verdict.skipped:
            self._clip(verdict.norm)
            for optimizer in used:
                self.scaler.step(optimizer)
        if self.scaler.is_enabled() and used:
            self.scaler.update()
        self._statistics.end_step(skipped=verdict.skipped)
        self._forget()
        return verdict

    def _judge(self) -> Verdict:
        signals = self._modules.signals.grad
        assert signals is not None
        owners = [
            (name, grad) for name, own in self._parameters.items() for one in own if (grad := one.grad) is not None
        ]
        norms = torch._foreach_norm([gradient for _, gradient in owners], dtype=torch.float32) if owners else ()
        # The one moment per step at which the host waits for the device.
        known = torch.cat([signals, torch.stack(norms)]).tolist() if norms else signals.tolist()
        health, stop, commit = known[:_NUM_WISHES]
        self._forget_unused(known[_NUM_WISHES : len(signals)])
        values: dict[str, list[float]] = {name: [] for name in self._parameters}
        for (name, _), value in zip(owners, known[len(signals) :], strict=True):
            values[name].append(value)
        by_optimizer = {name: math.hypot(*own) for name, own in values.items()}
        is_finite = all(math.isfinite(value) for value in by_optimizer.values())
        return Verdict(
            skipped=not (is_finite and health == 0),
            overflowed=health == 0 and not is_finite and self.scaler.is_enabled() and self.scaler.get_scale() > 1,
            stop=stop > 0,
            commit=commit > 0,
            norms=by_optimizer,
            norm=math.hypot(*by_optimizer.values()),
        )

    def _forget_unused(self, used: list[float]) -> None:
        """Take the zeros away that DDP gives to parameters which no rank has used: optimizers must not see them."""
        if not all(used):
            for parameter, count in zip(self._weights, used, strict=True):
                parameter.grad = parameter.grad if count else None

    def _clip(self, norm: float) -> None:
        if self._clip_norm is not None and norm > self._clip_norm:
            for parameters in self._parameters.values():
                clip_grads_with_norm_(parameters, self._clip_norm, torch.tensor(norm, device=self._processes.device))

    def _forget(self) -> None:
        self._modules.signals.grad = None
        for optimizer in self._experiment.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
