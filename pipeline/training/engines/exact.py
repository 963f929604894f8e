"""The exact engine: one tree over the step's batches gives the same bits at any number of processes."""

from __future__ import annotations

import torch

from pipeline.distributed.processes import Processes
from pipeline.errors import PipelineError
from pipeline.experiment.assembly import Experiment
from pipeline.experiment.gradient_flags import Flags
from pipeline.experiment.turns import Turn
from pipeline.training.engines.base import GradientEngine
from pipeline.training.engines.reduction import Tensors, TreeSums
from pipeline.training.step_plan import share_of


class ExactEngine(GradientEngine):
    """Every batch has a gradient of its own, which is added to its neighbours' in an order that never changes."""

    def __init__(self, experiment: Experiment, processes: Processes) -> None:
        super().__init__(experiment, processes, TreeSums)

    def _set_up(self, flags: Flags) -> None:
        super()._set_up(flags)
        self._sums = TreeSums(list(self._weights), self._processes)

    def begin_step(self, num_batches: int, turn: Turn | None = None) -> None:
        super().begin_step(num_batches, turn)
        self._positions = share_of(num_batches, self._processes.rank, self._processes.world_size)
        self._sums.begin(num_batches)
        if self._unfrozen:
            self._unfrozen_sums = TreeSums(list(self._unfrozen), self._processes)
            self._unfrozen_sums.begin(num_batches)
        self._num_done = 0
        self._used = [False] * (len(self._weights) + len(self._unfrozen))

    def _backward(self, roots: list[torch.Tensor], gradients: list[torch.Tensor], *, is_last: bool) -> None:
        super()._backward(roots, gradients, is_last=is_last)
        if self._num_done == len(self._positions):
            # A rank that has no batch in this step joins with an empty pass.
            return
        position = self._positions[self._num_done]
        self._num_done += 1
        is_first_of_two = position % 2 == 0 and position + 1 in self._positions
        if is_first_of_two:
            # Autograd accumulates two leaves of the tree in place, which is the same addition.
            return
        num_batches = 2 if position % 2 and position - 1 in self._positions else 1
        batch_gradients = self._take_gradients()
        self._sums.add(batch_gradients[: len(self._weights)], num_batches)
        if self._unfrozen:
            self._unfrozen_sums.add(batch_gradients[len(self._weights) :], num_batches)

    def _take_gradients(self) -> Tensors:
        """Take the gradients away from the weights, for the next batch to start without any."""
        weights = [*self._weights, *self._unfrozen]
        gradients: Tensors = [weight.grad for weight in weights]
        for index, weight in enumerate(weights):
            self._used[index] |= weight.grad is not None
            weight.grad = None
        if any(gradient is not None and gradient.is_sparse for gradient in gradients):
            raise PipelineError(
                "gradient_reduction: exact adds dense gradients only, but a module has sparse ones.\n"
                "  fix: create its embedding with sparse=False."
            )
        return gradients

    def _reduce(self) -> torch.Tensor:
        message = self._message(self._used[: len(self._weights)])
        wait_for_message = self._processes.all_reduce_async(message)
        self._sums.start()
        self._prefetch(while_device_works=False)
        for weight, gradient in zip(self._weights, self._sums.total(), strict=True):
            weight.grad = gradient
        wait_for_message()
        return message

    def _sum_unfrozen(self) -> None:
        for weight, gradient in zip(self._unfrozen, self._unfrozen_sums.total(), strict=True):
            weight.grad = gradient
        self._drop_unused(self._unfrozen, self._used[len(self._weights) :])
