"""The fast engine: torch's DistributedDataParallel, or nothing at all in a single process."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from pipeline.distributed.processes import Processes
from pipeline.experiment.assembly import Experiment
from pipeline.experiment.gradient_flags import Flags
from pipeline.training.engines.base import GradientEngine
from pipeline.training.engines.reduction import PlainSums

# Autograd runs the node with the highest number first.
_BEFORE_ALL_OTHERS = 1 << 62


class _Touch(torch.autograd.Function):
    """Makes parameters part of a graph without giving them a gradient.

    DDP waits for every parameter; one that a batch does not use reports as soon as its part of this node has run.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.num_parameters = len(parameters)  # type: ignore[attr-defined]
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> tuple[None, ...]:
        num_parameters: int = ctx.num_parameters  # type: ignore[attr-defined]
        return (None,) * num_parameters


def touch(*parameters: torch.Tensor) -> torch.Tensor:
    """Return a scalar from which a backward pass reaches all parameters and leaves no gradient."""
    root: torch.Tensor = _Touch.apply(*parameters)  # type: ignore[no-untyped-call]
    return root


def touch_first(parameters: list[nn.Parameter]) -> torch.Tensor:
    """Return a root like ``touch``'s that runs before all others of a backward pass; many passes may begin there."""
    root = touch(*parameters)
    # If autograd ran this node last, no parameter could report before the whole pass is over.
    root.grad_fn._set_sequence_nr(_BEFORE_ALL_OTHERS)  # type: ignore[union-attr]
    return root


class StepModule(nn.Module):
    """The weights of all trained modules as one module, so that one DDP reduces their gradients together.

    ``signals`` is not a weight: its gradient carries the message of a rank in the same reduction. It is registered
    first because DDP reduces in the reverse order: everything else may be on its way by then.
    """

    def __init__(self, weights: list[nn.Parameter], message: torch.Tensor) -> None:
        super().__init__()
        self.signals = nn.Parameter(torch.zeros_like(message))
        self.weights = nn.ParameterList(weights)

    def forward(self) -> None:
        """Compute nothing: DDP's own forward pass prepares its reducer for the backward pass that follows."""


class DdpEngine(GradientEngine):
    """Gradients accumulate locally, and torch adds them while the last backward pass still runs.

    DDP waits for every weight. All are touched in the last backward pass, so that those which a rank has not used
    report as well. The message lists which ones were used, so it follows in a small backward pass of its own.

    DDP rebuilds its buckets after the first backward pass in the order in which gradients became ready, so a
    resumed process would add its first step's gradients in another order than one that never stopped. A rehearsal
    settles the order before the first step.

    On CPUs, DDP would stand still in its backward pass until all sums are there. So we add them, in the same way, and
    wait for them when it is over: its buckets have the sums in place.
    """

    def __init__(self, experiment: Experiment, processes: Processes) -> None:
        super().__init__(experiment, processes, PlainSums)
        self.loss_scale = processes.world_size
        self._ddp: DistributedDataParallel | None = None
        self._waits: list[Callable[[], object]] = []

    def _set_up(self, flags: Flags) -> None:
        super()._set_up(flags)
        if self._processes.world_size == 1:
            return
        if self._ddp is not None:
            self._ddp._remove_autograd_hooks()
        # DDP takes only what requires a gradient at this moment.
        now = self._flags.now()
        self._flags.set(flags)
        self.begin_step(0)
        self._module = StepModule(self._weights, self._message(self._are_used()))
        # Ranks have compared their weights; there is nothing to broadcast.
        self._ddp = DistributedDataParallel(self._module, gradient_as_bucket_view=True, init_sync=False)
        if self._processes.device.type == "cpu":
            # A lambda, because torch refuses a hook whose annotations are strings, as those of this module are.
            self._ddp.register_comm_hook(None, lambda state, bucket: self._average_async(bucket))
        self._rehearse(self._ddp)
        self._touches = [touch_first(self._weights)] if self._weights else []
        self._flags.set(now)

    def _rehearse(self, ddp: DistributedDataParallel) -> None:
        """Let every parameter become ready once, from last to first, with no gradient at all."""
        in_order = [self._module.signals, *self._weights]
        ddp()
        torch.autograd.backward([touch(parameter) for parameter in in_order], [self._one] * len(in_order))
        self._reduce()
        self._clear_gradients()
        # The next forward pass rebuilds the buckets. Gradients that are there by then would be scaled in another way.
        with ddp.no_sync():
            ddp()

    def _backward(self, roots: list[torch.Tensor], gradients: list[torch.Tensor], *, is_last: bool) -> None:
        if self._ddp is None or not is_last:
            # DDP leaves alone what its own forward pass has not prepared it for: gradients accumulate locally.
            super()._backward(roots, gradients, is_last=is_last)
            return
        self._ddp()
        if roots or self._touches:
            torch.autograd.backward([*roots, *self._touches], [*gradients, *[self._one] * len(self._touches)])
        # Which weights were used is known now, and DDP waits for nothing but the message.
        torch.autograd.backward([self._module.signals], [self._message(self._are_used())])

    def _average_async(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """DDP's communication hook: begin to average a bucket over the ranks, and return a future that is done."""
        buffer = bucket.buffer()
        self._waits.append(self._processes.all_reduce_async(buffer.mul_(1 / self._processes.world_size)))
        done = Future[torch.Tensor]()
        done.set_result(buffer)
        return done

    def _reduce(self) -> torch.Tensor:
        """Return the message; between ranks, it is reduced with the gradients since the last backward pass."""
        if self._ddp is None:
            return self._message(self._are_used())
        self._prefetch(while_device_works=False)
        for wait in self._waits:
            wait()
        self._waits.clear()
        message = self._module.signals.grad
        assert message is not None
        return message

    def _clear_gradients(self) -> None:
        super()._clear_gradients()
        if self._ddp is not None:
            self._module.signals.grad = None
