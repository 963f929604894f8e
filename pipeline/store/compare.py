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
    names = sorted({name for top in tops for name in _readable(top)})
    for name in names:
        missing = [str(top) for top in tops if not (top / name).exists()]
        if missing:
            return f"{name} is missing in {missing[0]}"
        found = (dict(_leaves(read_any(top / name))) for top in tops)
        difference = _differing(*found)
        if difference:
            return f"{name}: {difference}"
    return None


def _readable(top: Path) -> Iterator[str]:
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
    return json.loads(path.read_text())


def _leaves(value: Any, path: str = "") -> Any:
    """Yield every leaf with its path as bytes: NaN equals NaN, and 0.0 differs from -0.0."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _leaves(child, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, child in enumerate(value):
            yield from _leaves(child, f"{path}[{index}]")
    elif isinstance(value, torch.Tensor):
        yield (
            path,
            (str(value.dtype), tuple(value.shape), value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()),
        )
    elif isinstance(value, np.ndarray):
        yield path, (str(value.dtype), value.shape, value.tobytes())
    else:
        yield path, repr(value)


def _differing(left: dict[str, Any], right: dict[str, Any]) -> str | None:
    if list(left) != list(right):
        return f"entries {sorted(set(left) ^ set(right))[:3]} are in one only"
    return next((f"value at {path or 'top'}" for path in left if left[path] != right[path]), None)
