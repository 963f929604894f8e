"""Optimizers that torch does not have: sharpness-aware minimisation (SAM) around any of torch's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

_SMALLEST_NORM = 1e-12


class SharpnessAware(Optimizer):
    """What ``sharpness_aware`` adds to the class of an optimizer: two turns per step over the same batches.

    In the first turn the weights are moved up the gradient by ``rho``. In the second they go back, to the bit, and the
    optimizer takes its step with the gradient that was found there.
    """

    turns_per_step = 2
    rho: float
    # The weights as they were, while they are moved: never at the end of a step, so commits need not hold them.
    _before: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    @property
    def is_between_turns(self) -> bool:
        """Whether the step has another turn, so that what was done is not an update yet."""
        return self._before is not None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self._before is None:
            self._move()
            return None
        self._go_back()
        return super().step(closure)

    def skip_step(self) -> None:
        """Called in place of ``step`` in a turn whose gradient is not finite, or that has none."""
        if self._before is None:
            # The second turn takes a plain step.
            self._before = []
        else:
            self._go_back()

    def _move(self) -> None:
        weights = [weight for group in self.param_groups for weight in group["params"] if weight.grad is not None]
        gradients = [weight.grad for weight in weights]
        norms = torch._foreach_norm(gradients)
        scale = self.rho / (torch.linalg.vector_norm(torch.stack(norms)) + _SMALLEST_NORM)
        self._before = [(weight, weight.detach().clone()) for weight in weights]
        torch._foreach_add_(weights, torch._foreach_mul(gradients, scale))

    @torch.no_grad()
    def _go_back(self) -> None:
        for weight, before in self._before or ():
            weight.copy_(before)
        self._before = None


def sharpness_aware(
    optimizer: type[Optimizer], params: Iterable[Any], rho: float = 0.05, **arguments: Any
) -> SharpnessAware:
    """Return an optimizer of a class of torch's, with these arguments, that minimises sharpness as well (SAM).

    It needs two turns over the same batches: ``"turns": [["main"], ["main"]]`` and ``"share_batches": true``.
    """
    if not rho > 0:
        raise ValueError(f"rho must be greater than 0, but is {rho!r}.")
    created: SharpnessAware = type(f"SharpnessAware{optimizer.__name__}", (SharpnessAware, optimizer), {"rho": rho})(
        params, **arguments
    )
    return created
