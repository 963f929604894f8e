"""Comparing two results folders bit by bit, naming the first difference."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.serialization.npz_files import load_arrays
from pipeline.serialization.sharded_files import INDEX, load_shards
from pipeline.serialization.torch_files import load_tensors


def first_difference(left: Path, right: Path) -> str | None:
    """Return where two ``data`` folders differ first, or None if every value has the same bits."""
    tops = (left, right)
    for name in sorted({name for top in tops for name in _readable_names(top)}):
        for top in tops:
            if not (top / name).exists():
                return f"{name} is missing in {top}"
        ours, theirs = (dict(_leaves(read_any(top / name))) for top in tops)
        if list(ours) != list(theirs):
            return f"{name}: entries {sorted(set(ours) ^ set(theirs))[:3]} are in one only"
        for path, value in ours.items():
            if value != theirs[path]:
                return f"{name}: value at {path or 'top'}"
    return None


def _readable_names(top: Path) -> Iterator[str]:
    """Yield the files below a folder; a folder of shards is one, whatever number of processes has cut it."""
    folders = {path.parent for path in top.rglob(INDEX)}
    yield from (folder.relative_to(top).as_posix() for folder in folders)
    files = (path for path in top.rglob("*") if path.is_file() and path.parent not in folders)
    yield from (path.relative_to(top).as_posix() for path in files)


def read_any(path: Path) -> Any:
    """Read a results file, or a folder of shards, with torch, numpy or json alone."""
    if path.is_dir():
        return load_shards(path)
    if path.suffix == ".pt":
        return load_tensors(path)
    if path.suffix == ".npz":
        return load_arrays(path)
    # What components and artifacts write may be of any kind.
    return json.loads(path.read_text()) if path.suffix == ".json" else path.read_bytes()


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield every leaf with its path."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _leaves(child, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, child in enumerate(value):
            yield from _leaves(child, f"{path}[{index}]")
    elif isinstance(value, torch.Tensor):
        # As bytes: NaN equals NaN, and 0.0 differs from -0.0.
        content = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        yield path, (str(value.dtype), tuple(value.shape), content)
    elif isinstance(value, np.ndarray):
        yield path, (str(value.dtype), value.shape, value.tobytes())
    else:
        yield path, repr(value)
