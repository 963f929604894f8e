"""Refuses collectives that the code of an experiment calls inside a batch.

Ranks run different batches, and different numbers of them. A collective inside a batch would wait for ranks that never
call it, until the timeout of the process group ends the run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch.distributed as dist

from pipeline.errors import PipelineError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
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
# The files whose code is running a batch, innermost last; empty while the pipeline's own code runs.
_files_in_batch: list[str] = []


class collectives_refused:  # noqa: N801 (used like a function)
    """Make collectives raise inside this block, which runs code of the file ``where``."""

    # Entered twice per batch: a generator with a decorator would take three times as long.
    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        _files_in_batch.append(self._where)

    def __exit__(self, *error: object) -> None:
        _files_in_batch.pop()


def guard_collectives() -> None:
    """Wrap the collectives of torch.distributed so that ``collectives_refused`` takes effect; call it once."""
    # As attributes of the module, because an author's code finds them there, and so does torch's SyncBatchNorm.
    for name in _COLLECTIVES:
        setattr(dist, name, _guard(name, getattr(dist, name)))


def _guard(name: str, function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    @functools.wraps(function)
    def call(*arguments: Parameters.args, **named: Parameters.kwargs) -> Result:
        if _files_in_batch:
            raise PipelineError(
                f"{_files_in_batch[-1]} must compute with its own batch alone, but calls torch.distributed.{name}: "
                "ranks run different batches, and different numbers of them, so that it would wait for ever.\n"
                "  fix: remove the call. For BatchNorm over all ranks, set sync_batchnorm in settings/training.json; "
                "sums and means over ranks are what loss registers record."
            )
        return function(*arguments, **named)

    return call
