"""The tree over the batches of a step is the same however they are dealt."""

from __future__ import annotations

from math import log2

import pytest

from pipeline.training.engines.reduction import Branch, Branches, branches_of
from pipeline.training.step_plan import share_of


def added(left: str, right: str) -> str:
    return f"({left}+{right})"


def expression(num_batches: int, world_size: int) -> str:
    """Return in which order batches are added when they are dealt to so many ranks, as a formula."""
    whole = Branches[str](added)
    for rank in range(world_size):
        own = Branches[str](added)
        for position in share_of(num_batches, rank, world_size):
            own.push(Branch(position, 1, str(position)))
        for branch in own.held:
            whole.push(branch)
    return whole.root()


def test_tree_adds_pairs_of_pairs() -> None:
    """Neighbours are added first; what has no partner goes up as it is."""
    assert expression(7, 1) == "(((0+1)+(2+3))+((4+5)+6))"


@pytest.mark.parametrize("num_batches", [*range(1, 34), 100])
def test_order_of_addition_does_not_depend_on_the_number_of_ranks(num_batches: int) -> None:
    """One rank alone adds as any number of them do together, idle ones included."""
    alone = expression(num_batches, 1)
    assert {expression(num_batches, world_size) for world_size in range(2, 12)} == {alone}


def test_a_rank_holds_few_branches() -> None:
    """However many batches a rank has, it keeps about twice their logarithm, and not one sum per batch."""
    for world_size in (1, 2, 3, 7):
        for num_batches in range(1, 300):
            most = max(len(branches_of(num_batches, rank, world_size)) for rank in range(world_size))
            assert most <= 2 * log2(num_batches) + 1


def test_batches_are_dealt_once_and_evenly() -> None:
    """Every batch goes to one rank, in order, and no rank has two more than another."""
    for num_batches in range(20):
        shares = [share_of(num_batches, rank, 3) for rank in range(3)]
        assert [position for share in shares for position in share] == list(range(num_batches))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
