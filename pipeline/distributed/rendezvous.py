"""Rendezvous: a store prefix that is unique to this start, so that stale keys of an earlier one are never read."""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from pipeline.errors import PipelineError

_SECONDS_BETWEEN_LOOKS = 0.02


def meet(rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return a store that only the processes of this start use.

    torchrun keeps its store over restarts, with the addresses of dead processes in it. A process that reads one of them
    waits for ever. With several torchruns, nothing that they pass to their processes distinguishes one start from the
    next, not even the number of restarts. Therefore rank 0 draws a random prefix and gives it to ranks that ask now.
    """
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    return receive(store, world_size, timeout) if rank == 0 else ask(store, rank, timeout)


def receive(store: Store, world_size: int, timeout: timedelta) -> Store:
    """On rank 0: answer questions until all other ranks have joined."""
    prefix = uuid.uuid4().hex
    deadline = time.monotonic() + timeout.total_seconds()
    shared = PrefixStore(prefix, store)
    missing = list(range(1, world_size))
    while True:
        for rank in missing:
            # In every round again: the question may be that of a dead process, and the living one may replace it any
            # time. An answer to a dead process is never read.
            if store.check([f"question_{rank}"]):
                store.set(f"answer_to_{store.get(f'question_{rank}').decode()}", prefix)
        # Below the prefix, where only processes of this start can write.
        missing = [rank for rank in missing if not shared.check([f"has_come_{rank}"])]
        if not missing:
            return shared
        if time.monotonic() > deadline:
            raise _timeout_error(
                f"of {world_size} processes, rank {', '.join(map(str, missing))} did not come", timeout
            )
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def ask(store: Store, rank: int, timeout: timedelta) -> Store:
    """On the other ranks: ask rank 0 for the prefix and join."""
    # A random question, so that the answer cannot be one that an earlier rank 0 gave to an earlier process.
    question = uuid.uuid4().hex
    store.set(f"question_{rank}", question)
    try:
        prefix = store.get(f"answer_to_{question}").decode()
    except DistStoreError as error:
        raise _timeout_error(f"rank 0 did not answer rank {rank}", timeout) from error
    shared = PrefixStore(prefix, store)
    shared.set(f"has_come_{rank}", "")
    return shared


def has_twins(store: Store, world_size: int, identity: str) -> bool:
    """Return, on all ranks, whether any two ranks have the same identity; empty identities do not count."""
    # Through the store, because this must be known before the process group exists.
    if identity and store.add(f"identity_{identity}", 1) > 1:
        store.set("has_twins", "")
    # ``add`` is atomic, so the last rank to count itself knows that all others have reported.
    if store.add("num_identities", 1) == world_size:
        store.set("has_all_identities", "")
    store.wait(["has_all_identities"])
    return bool(store.check(["has_twins"]))


def _timeout_error(problem: str, timeout: timedelta) -> PipelineError:
    return PipelineError(
        f"All processes must meet within {timeout.total_seconds() / 60:g} minutes, but {problem}.\n"
        "  fix: look at the output of torchrun on every machine, then run again with --auto."
    )
