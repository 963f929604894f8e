"""The engine of sharded modules: torch's FSDP2 adds the gradients of every batch, and each rank keeps its shards."""

from __future__ import annotations

import math
from typing import Any

import torch

from pipeline.distributed.processes import Processes
from pipeline.experiment.assembly import Experiment
from pipeline.training.engines.base import GradientEngine
from pipeline.training.engines.reduction import PlainSums


class FsdpEngine(GradientEngine):
    """Gradients are added over the ranks with every batch, which is what keeps them small.

    What is left for the end of a step is one small sum: the messages, and the squares of what each rank has of the
    gradients' norms.
    """

    def __init__(self, experiment: Experiment, processes: Processes) -> None:
        super().__init__(experiment, processes, PlainSums)
        self.loss_scale = processes.world_size
        # Recognised by what they can do: FSDP's packages take long to import, and every run imports this module.
        self._units: list[Any] = [
            layer
            for module in experiment.components.all_modules.values()
            for layer in module.modules()
            if hasattr(layer, "reshard")
        ]

    def _reduce(self) -> torch.Tensor:
        """Return this rank's message; it is added over the ranks together with the norms."""
        # What was run without a backward pass is still whole, and would not see the update.
        self.reshard()
        return self._message([])

    def reshard(self) -> None:
        for unit in self._units:
            unit.reshard()

    def _reduce_unfrozen(self, message: torch.Tensor) -> None:
        """torch reduces whatever requires a gradient when a batch runs; ranks compare their flags with the norms."""

    def _gradients(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, gradient.to_local()) for name, gradient in super()._gradients()]  # type: ignore[attr-defined]

    def _read_numbers(self, message: torch.Tensor, norms: list[torch.Tensor]) -> list[float]:
        squares = [norm.double().square().view(1) for norm in norms]
        numbers = self._processes.sum(torch.cat([message.double(), *squares])).tolist()
        return [*numbers[: len(message)], *map(math.sqrt, numbers[len(message) :])]

    def _clip(self, optimizers: list[str], max_norm: float, norm: float) -> None:
        # As torch's clip_grads_with_norm_ does it, which does not take shards with a plain norm.
        factor = max_norm / (self._on_device(norm) + 1e-6)
        torch._foreach_mul_([gradient for name, gradient in self._gradients() if name in optimizers], factor)
