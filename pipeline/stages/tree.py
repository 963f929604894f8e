"""One tree over the batches of a step: additions along it give the same bits however the batches are dealt.

It is the binary tree over 0, 1, 2, …: batches 2k and 2k + 1 are added first, then pairs of pairs, and so on; what has
no partner goes up as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

from pipeline.stages.plan import share_of

Value = TypeVar("Value")


@dataclass(frozen=True)
class Branch(Generic[Value]):
    """The sum of all batches below one branch of the tree: ``size`` of them from ``start`` on."""

    start: int
    size: int
    value: Value

    def is_left_of(self, other: Branch[Value]) -> bool:
        """Tell whether the two are the halves of one branch."""
        return self.size == other.size and self.start % (2 * self.size) == 0


class Branches(Generic[Value]):
    """Neighbouring branches, from left to right; two halves become a whole as soon as both are there.

    So there are never more than about twice as many as the logarithm of the number of batches.
    """

    def __init__(self, add: Callable[[Value, Value], Value]) -> None:
        self._add = add
        self.held: list[Branch[Value]] = []

    def push(self, branch: Branch[Value]) -> None:
        """Take the branch that follows the last one."""
        while self.held and self.held[-1].is_left_of(branch):
            left = self.held.pop()
            branch = Branch(left.start, 2 * left.size, self._add(left.value, branch.value))
        self.held.append(branch)

    def root(self) -> Value:
        """Return the sum of all, once nothing follows any more."""
        *rest, last = self.held
        value = last.value
        for branch in reversed(rest):
            value = self._add(branch.value, value)
        return value


@lru_cache(maxsize=1024)
def branches_of(num_batches: int, rank: int, world_size: int) -> tuple[Branch[None], ...]:
    """Return the branches whose sums one rank can make of its own batches of a step."""
    branches = Branches[None](lambda left, right: None)
    for position in share_of(num_batches, rank, world_size):
        branches.push(Branch(position, 1, None))
    return tuple(branches.held)
