"""How processes find each other in a store that others have used before them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from pipeline.distributed.rendezvous import ask, has_twins, receive
from pipeline.errors import PipelineError

LIMIT = timedelta(seconds=20)


def meet_three(store: Store) -> list[Store]:
    with ThreadPoolExecutor() as pool:
        others = [pool.submit(ask, store, rank, LIMIT) for rank in (1, 2)]
        return [receive(store, 3, LIMIT), *(other.result() for other in others)]


def test_processes_of_one_start_share_a_store_and_find_nothing_in_it() -> None:
    """All of them see what one has set, and nothing that an earlier start has left."""
    store = dist.HashStore()
    for address in (b"of the first start", b"of the second"):
        stores = meet_three(store)
        assert not any(shared.check(["address"]) for shared in stores)
        stores[1].set("address", address)
        assert [shared.get("address") for shared in stores] == [address] * 3


def test_question_of_a_dead_process_does_not_count() -> None:
    """Rank 0 answers it in vain, and continues until the living process has joined."""
    store = dist.HashStore()
    store.set("question_1", "of a process that was killed")
    with ThreadPoolExecutor() as pool:
        zero = pool.submit(receive, store, 2, LIMIT)
        ask(store, 1, LIMIT).set("key", "value")
        assert zero.result().get("key") == b"value"


def test_process_that_does_not_come_is_named() -> None:
    """After the timeout, the missing ranks are named."""
    with pytest.raises(PipelineError, match=r"of 3 processes, rank 1, 2 did not come\.\n  fix: look at the output"):
        receive(dist.HashStore(), 3, timedelta(seconds=0.1))


def test_rank_zero_that_does_not_answer_is_reported() -> None:
    """A rank that gets no answer says so in a sentence."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(PipelineError, match=r"but rank 0 did not answer rank 1\.\n  fix:"):
        ask(store, 1, timedelta(seconds=0.1))


@pytest.mark.parametrize(
    ("identities", "expected"), [(["a", "b", "c"], False), (["a", "b", "a"], True), (["", "", ""], False)]
)
def test_every_rank_learns_whether_two_are_the_same(identities: list[str], expected: bool) -> None:
    """All ranks learn that two of them use the same device; ranks without an identity do not count."""
    store = dist.HashStore()
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(has_twins, store, 3, identity) for identity in identities]
        assert [answer.result() for answer in answers] == [expected] * 3
