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
    """Return a store of this very start.

    torchrun may keep the store of the processes before a restart, and with it their addresses: a process that reads
    one of those waits for ever. Where several torchruns work together, nothing they hand down distinguishes one start
    from the next, not even the number of restarts. So rank zero draws a name, and gives it to those who ask now.
    """
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    return receive(store, world_size, timeout) if rank == 0 else ask(store, rank, timeout)


def receive(store: Store, world_size: int, timeout: timedelta) -> Store:
    """Answer everyone who asks until all others have come; an answer to a dead process is never read."""
    name = uuid.uuid4().hex
    limit = time.monotonic() + timeout.total_seconds()
    shared = PrefixStore(name, store)
    missing = list(range(1, world_size))
    while missing:
        for rank in missing:
            if store.check([f"question_{rank}"]):
                store.set(f"answer_to_{store.get(f'question_{rank}').decode()}", name)
        missing = [rank for rank in missing if not shared.check([f"has_come_{rank}"])]
        if time.monotonic() > limit:
            raise _not_met(f"of {world_size} processes, rank {', '.join(map(str, missing))} did not come", timeout)
        time.sleep(_SECONDS_BETWEEN_LOOKS if missing else 0)
    return shared


def ask(store: Store, rank: int, timeout: timedelta) -> Store:
    """Ask rank zero for the name of the store; it answers to this question and to no older one."""
    question = uuid.uuid4().hex
    store.set(f"question_{rank}", question)
    try:
        name = store.get(f"answer_to_{question}").decode()
    except DistStoreError as error:
        raise _not_met(f"rank 0 did not answer rank {rank}", timeout) from error
    shared = PrefixStore(name, store)
    shared.set(f"has_come_{rank}", "")
    return shared


def has_twins(store: Store, world_size: int, identity: str) -> bool:
    """Return, on all ranks, whether any two of them have the same identity; empty ones do not count."""
    if identity and store.add(f"identity_{identity}", 1) > 1:
        store.set("has_twins", "")
    if store.add("num_identities", 1) == world_size:
        store.set("has_all_identities", "")
    store.wait(["has_all_identities"])
    return bool(store.check(["has_twins"]))


def _not_met(what: str, timeout: timedelta) -> PipelineError:
    return PipelineError(
        f"All processes must meet within {timeout.total_seconds() / 60:g} minutes, but {what}.\n"
        "  fix: look at the output of torchrun on every machine, then run again with --auto."
    )
