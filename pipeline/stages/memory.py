"""Out of memory: which batch it was, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch

from pipeline.errors import PipelineError
from pipeline.stages.plan import Place

_MESSAGES = ("out of memory", "can't allocate memory")
_MAX_TENSORS = 8


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an exception says that a device, or this machine, has no memory left."""
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in _MESSAGES)


@contextmanager
def out_of_memory_explained(batch: Any, place: Place, device: torch.device) -> Iterator[None]:
    """Turn a lack of memory in this block into one sentence that names the batch."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, PipelineError) or not is_out_of_memory(error):
            raise
        dataset = place.shape.dataset
        shapes = ", ".join(islice(_shapes(batch), _MAX_TENSORS)) or type(batch).__name__
        raise PipelineError(
            f"Out of memory on {device} in a batch of dataset {dataset!r} with batch_size {place.shape.batch_size}: "
            f"{shapes}.\n"
            f"  fix: lower batch_size in pymodules/dataloaders/{dataset}.py, which leaves the items of a step as they "
            "are, or set precision to bf16 in settings/training.json; then start again with --reset."
        ) from error


def _shapes(batch: Any, name: str = "") -> Iterator[str]:
    """Yield name, shape and type of the tensors of a batch."""
    if isinstance(batch, torch.Tensor):
        yield f"{name} {tuple(batch.shape)} {str(batch.dtype).removeprefix('torch.')}".strip()
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _shapes(value, f"{name}.{key}".lstrip("."))
    elif isinstance(batch, (list, tuple)):
        for index, value in enumerate(batch):
            yield from _shapes(value, f"{name}[{index}]")
