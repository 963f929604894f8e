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

_NUM_SIGNALS = 3


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


class StepModule(nn.Module):
    """All trained modules as one, so that one engine reduces their gradients together.

    ``signals`` is no weight: its gradient carries, in the same reduction, whether any rank met a loss that
    is not finite, was asked to stop, or wants a commit. No other communication is needed to agree on it.
    """

    def __init__(self, modules: list[nn.Module], device: torch.device) -> None:
        super().__init__()
        self.signals = nn.Parameter(torch.zeros(_NUM_SIGNALS, device=device))
        self.trained = nn.ModuleList(modules)

    def forward(self, compute: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return compute(self.signals)


class GradientEngine:
    """One step's gradients with torch's DistributedDataParallel, or without it in a single process.

    Unused parameters are searched for: modules may take part in some datasets only, and DDP then keeps its
    buckets as they are, which makes a resumed process add gradients in the same order as one that never stopped.
    """

    def __init__(self, experiment: Experiment, processes: Processes) -> None:
        self._experiment, self._processes = experiment, processes
        training = experiment.settings.training
        self._clip_norm = training.grad_clip_norm
        self._modules = StepModule(list(experiment.components.trained_modules.values()), processes.device)
        self._buffers = sorted(self._modules.buffers(), key=lambda buffer: -buffer.element_size())
        self._engine: nn.Module = self._modules
        if processes.world_size > 1:
            self._engine = DistributedDataParallel(
                self._modules, find_unused_parameters=True, broadcast_buffers=False, gradient_as_bucket_view=True
            )
        self._parameters = {
            name: [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for name, optimizer in experiment.optimizers.items()
        }
        self.scaler = torch.amp.GradScaler(processes.device.type, enabled=training.precision == "fp16")
        self._scale = float(processes.world_size)

    def share_buffers(self) -> None:
        """Give every rank rank zero's buffers, so that nothing depends on what a lost process had seen."""
        if self._processes.world_size == 1 or not self._buffers:
            return
        # Wider types come first, so that every slice of the bytes is aligned for its type.
        flat = torch.cat([buffer.reshape(-1).view(torch.uint8) for buffer in self._buffers])
        self._processes.send_from_rank_zero(flat)
        for buffer, part in zip(
            self._buffers, flat.split([b.numel() * b.element_size() for b in self._buffers]), strict=True
        ):
            buffer.copy_(part.view(buffer.dtype).view_as(buffer))

    def backward(self, compute: Callable[[], tuple[torch.Tensor, torch.Tensor]], wishes: Wishes | None) -> None:
        """Add the gradients of one batch; the rank's last batch of a step brings its wishes and is reduced.

        ``compute`` returns the batch's share of the step's loss and a sum that is finite if all losses are.
        """
        is_last = wishes is not None
        asked = [0.0, *(self._asked(wishes) if wishes else (0.0, 0.0))]

        def with_signals(signals: torch.Tensor) -> torch.Tensor:
            loss, health = compute()
            carried = torch.tensor(asked, device=signals.device)
            carried[0] = health * 0
            # DDP averages over the ranks; the loss is already normalised by the items of all ranks.
            return loss * self._scale + (signals * carried).sum()

        with contextlib.nullcontext() if is_last else self._no_sync():
            self.scaler.scale(self._engine(with_signals)).backward()

    def join_without_batch(self, wishes: Wishes) -> None:
        """Take part in the reduction of a step in which this rank has no batch."""
        zero = torch.zeros((), device=self._processes.device)
        self.backward(lambda: (zero, zero), wishes)

    def _no_sync(self) -> Any:
        engine = self._engine
        return engine.no_sync() if isinstance(engine, DistributedDataParallel) else contextlib.nullcontext()

    def _asked(self, wishes: Wishes) -> tuple[float, float]:
        return float(wishes.stop), float(wishes.commit)

    def finish_step(self) -> Verdict:
        """Apply the reduced gradients, or skip the step if anything was not finite; the same on every rank."""
        for optimizer in self._experiment.optimizers.values():
            self.scaler.unscale_(optimizer) if self.scaler.is_enabled() else None
        verdict = self._judge()
        if not verdict.skipped:
            self._clip(verdict.norm)
            for optimizer in self._experiment.optimizers.values():
                self.scaler.step(optimizer)
        if self.scaler.is_enabled():
            self.scaler.update()
        self._forget()
        return verdict

    def _judge(self) -> Verdict:
        norms = [get_total_norm(self._gradients(name)) for name in self._parameters]
        signals = self._modules.signals.grad
        assert signals is not None
        # The one moment per step at which the host waits for the device.
        health, stop, commit, *values = torch.cat([signals, torch.stack(norms).to(signals.dtype)]).tolist()
        is_finite = all(math.isfinite(value) for value in values)
        return Verdict(
            skipped=not (is_finite and health == 0),
            overflowed=self.scaler.is_enabled() and health == 0 and not is_finite,
            stop=stop > 0,
            commit=commit > 0,
            norms=dict(zip(self._parameters, values, strict=True)),
            norm=math.hypot(*values),
        )

    def _gradients(self, name: str) -> list[torch.Tensor]:
        found = [parameter.grad for parameter in self._parameters[name] if parameter.grad is not None]
        return found or [torch.zeros((), device=self._processes.device)]

    def _clip(self, norm: float) -> None:
        if self._clip_norm is not None and norm > self._clip_norm:
            for parameters in self._parameters.values():
                clip_grads_with_norm_(parameters, self._clip_norm, torch.tensor(norm, device=self._processes.device))

    def _forget(self) -> None:
        self._modules.signals.grad = None
        for optimizer in self._experiment.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
