"""The fast engine: torch's DistributedDataParallel, or nothing at all in a single process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.experiment.assembly import Experiment
from pipeline.runtime.processes import Processes
from pipeline.stages.gradients import Compute, GradientEngine, Wishes
from pipeline.stages.sums import PlainSums


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

    ``signals`` is no weight: its gradient carries the message of a rank in the same reduction. It is registered
    first because DDP reduces in the reverse order: everything else may be on its way by then.

    A hook replaces its gradient by the message. Autograd runs nodes in the reverse order of their creation, so a
    forward pass that begins with ``signals`` asks for the message when all its other gradients are there.
    """

    def __init__(self, weights: list[nn.Parameter], message: torch.Tensor) -> None:
        super().__init__()
        self.signals = nn.Parameter(torch.zeros_like(message))
        self.weights = nn.ParameterList(weights)

    def forward(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        return compute()


class DdpEngine(GradientEngine):
    """Gradients accumulate locally, and torch adds them while the last backward pass still runs.

    DDP rebuilds its buckets after the first backward pass in the order in which gradients became ready, so a
    resumed process would add its first step's gradients in another order than one that never stopped. A rehearsal
    settles the order before the first step.
    """

    def __init__(self, experiment: Experiment, processes: Processes) -> None:
        super().__init__(experiment, processes, lambda like: PlainSums(like, processes))
        self.loss_scale = processes.world_size
        self._module = StepModule(self._weights, self._message(Wishes(), [False] * len(self._weights), []))
        self._said: tuple[Wishes | None, list[torch.Tensor]] = None, []
        self._engine: nn.Module = self._module
        if processes.world_size > 1:
            self._engine = DistributedDataParallel(self._module, gradient_as_bucket_view=True)
            self._rehearse()
        self._module.signals.register_hook(self._message_of_batch)

    def _rehearse(self) -> None:
        """Let every parameter become ready once, from last to first, with no gradient at all."""
        in_order = [self._module.signals, *self._weights]
        touch = _Touch.apply
        self._engine(lambda: torch.stack([touch(parameter) for parameter in in_order]).sum()).backward()  # type: ignore[no-untyped-call]
        self._forget()

    def _backward(self, compute: Compute, wishes: Wishes | None) -> None:
        def with_signals() -> torch.Tensor:
            carried = self._module.signals[0]
            terms, sums = compute()
            self._said = wishes, sums
            if wishes is not None and self._processes.world_size > 1:
                terms.append(_Touch.apply(*self._weights))  # type: ignore[no-untyped-call]
            return sum(terms, carried)

        with self._no_sync() if wishes is None else contextlib.nullcontext():
            self.scaler.scale(self._engine(with_signals)).backward()

    def _no_sync(self) -> Any:
        engine = self._engine
        return engine.no_sync() if isinstance(engine, DistributedDataParallel) else contextlib.nullcontext()

    def _message_of_batch(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the signals' gradient; wishes, and what was used, count once, with the rank's last batch."""
        wishes, sums = self._said
        used = [wishes is not None and parameter.grad is not None for parameter in self._weights]
        return self._message(wishes or Wishes(), used, sums)

    def _reduce(self) -> torch.Tensor:
        """Return the message; the gradients were reduced with it in the last backward pass."""
        message = self._module.signals.grad
        assert message is not None
        return message

    def _forget(self) -> None:
        super()._forget()
        self._module.signals.grad = None
