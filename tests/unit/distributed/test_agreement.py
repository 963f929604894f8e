"""Differences between ranks in words."""

from __future__ import annotations

from pipeline.distributed.agreement import Difference, find_differences
from pipeline.distributed.processes import Processes


def test_the_rank_that_deviates_is_named() -> None:
    """Of three ranks the one that differs from the other two; of two ranks both."""
    assert str(Difference("x", ((0, 2), (1,)))) == "rank 1 differs from ranks 0 and 2 in x"
    assert str(Difference("x", ((0,), (1, 2, 3)))) == "rank 0 differs from ranks 1, 2 and 3 in x"
    assert str(Difference("x", ((0, 1, 2), (3,), (4,)))) == "ranks 3 and 4 differ from ranks 0, 1 and 2 in x"
    assert str(Difference("x", ((0,), (1,)))) == "ranks 0 and 1 differ in x"


class Group(Processes):
    """Three ranks, of which this one hears what the others say."""

    def gather(self, value):  # type: ignore[no-untyped-def]
        other = {**value, "b": 3} if isinstance(value, dict) else b"another digest"
        return [value, value, other]


def test_values_travel_only_if_digests_differ() -> None:
    """The first difference in the order of the values is the first in the list; equal values are left out."""
    found = find_differences(Group(0, 3), {"a": 1, "b": 2})
    assert found == [Difference("b", ((0, 1), (2,)))]
    assert find_differences(Processes(), {"a": 1}) == []
