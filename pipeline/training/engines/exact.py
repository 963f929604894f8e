"""The exact engine: one tree over the step's batches gives the same bits at any number of processes."""

from __future__ import annotations

import torch

from pipeline.distributed.processes import Processes
from pipeline.errors import PipelineError
from pipeline.experiment.assembly import Experiment
from pipeline.experiment.gradient_flags import Flags
from pipeline.training.engines.base import Compute, GradientEngine
from pipeline.training.engines.reduction import Tensors, TreeSums
from pipeline.training.step_plan import share_of


class ExactEngine(GradientEngine):
    """Every batch has a gradient of its own, which is added to its neighbours' in an order that never changes.

    Two batches that are added first are left to autograd, which adds the second gradient to the first in place.
    """

    def __init__(self, experiment: Experiment, processes: Processes) -> None:
        super().__init__(experiment, processes, lambda like: TreeSums(like, processes))

    def _set_up(self, flags: Flags) -> None:
        super()._set_up(flags)
        self._sums = TreeSums(list(self._weights), self._processes)

    def begin_step(self, num_batches: int) -> None:
        super().begin_step(num_batches)
        self._own = share_of(num_batches, self._processes.rank, self._processes.world_size)
        self._sums.begin(num_batches)
        if self._unfrozen:
            self._unfrozen_sums = TreeSums(list(self._unfrozen), self._processes)
            self._unfrozen_sums.begin(num_batches)
        self._num_done = 0
        self._used = [False] * (len(self._weights) + len(self._unfrozen))

    def _backward(self, compute: Compute, *, is_last: bool) -> None:
        super()._backward(compute, is_last=is_last)
        if self._num_done < len(self._own):
            self._after_batch(self._own[self._num_done])

    def _after_batch(self, position: int) -> None:
        self._num_done += 1
        is_first_of_two = position % 2 == 0 and position + 1 in self._own
        if not is_first_of_two:
            gradients = self._taken()
            num_batches = 2 if position % 2 and position - 1 in self._own else 1
            self._sums.add(gradients[: len(self._weights)], num_batches)
            if self._unfrozen:
                self._unfrozen_sums.add(gradients[len(self._weights) :], num_batches)

    def _taken(self) -> Tensors:
        """Take the gradients away from the weights, for the next batch to start without any."""
        weights = [*self._weights, *self._unfrozen]
        gradients: Tensors = [weight.grad for weight in weights]
        self._used = [is_used or one is not None for is_used, one in zip(self._used, gradients, strict=True)]
        for weight in weights:
            weight.grad = None
        if any(gradient is not None and gradient.is_sparse for gradient in gradients):
            raise PipelineError(
                "gradient_reduction: exact adds dense gradients only, but a module has sparse ones.\n"
                "  fix: create its embedding with sparse=False."
            )
        return gradients

    def _reduce(self) -> torch.Tensor:
        message = self._message(self._used[: len(self._weights)])
        wait = self._processes.all_reduce_async(message)
        for weight, gradient in zip(self._weights, self._sums.total(self._while_ranks_wait), strict=True):
            weight.grad = gradient
        wait()
        return message

    def _sum_unfrozen(self) -> None:
        for weight, gradient in zip(self._unfrozen, self._unfrozen_sums.total(), strict=True):
            weight.grad = gradient
        self._forget_if_unused(self._unfrozen, self._used[len(self._weights) :])
