"""Refuses collectives that an author's code calls inside a batch.

Ranks run different batches, and different numbers of them. A collective inside one would wait for ranks that never
call it, until the timeout of the process group ends the run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from pipeline.errors import PipelineError

_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
)
# The file whose code is running a batch, if any is.
_running: list[str] = []


@contextmanager
def collectives_refused(where: str) -> Iterator[None]:
    """Raise at once if code in this block, which belongs to the file ``where``, calls a collective."""
    _running.append(where)
    try:
        yield
    finally:
        _running.pop()


def guard_collectives() -> None:
    """Let the functions of torch.distributed know about the blocks above; called once per process."""
    for name in _COLLECTIVES:
        setattr(dist, name, _guarded(name, getattr(dist, name)))


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if _running:
            raise PipelineError(
                f"{_running[-1]} must compute with its own batch alone, but calls torch.distributed.{name}: ranks run "
                "different batches, and different numbers of them, so that it would wait for ever.\n"
                "  fix: remove the call. For BatchNorm over all ranks, set sync_batchnorm in settings/training.json; "
                "sums and means over ranks are what loss registers record."
            )
        return function(*arguments, **named)

    return call
