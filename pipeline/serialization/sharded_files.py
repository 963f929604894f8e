"""Folders of shards: a state whose tensors are spread over processes, in the format of torch's distributed checkpoint.

    __<rank>_0.distcp   the pieces of one process
    .metadata           where torch looks for them
    index.json          the same for us: safe to read, and checked before anything is allocated
    values.pt           all of the state that is not a tensor

Any number of processes can read what any number has written, each its own pieces and without talking to the others.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import torch

from pipeline.serialization.npz_files import opened_file, reported_as_unreadable
from pipeline.serialization.shard_index import Keys, StoredTensor, local_part, parse_index
from pipeline.serialization.torch_files import load_tensors, load_weights
from pipeline.system.files import regular_size

INDEX = "index.json"
VALUES = "values.pt"
_WHAT = "shards written by torch's distributed checkpoint"
# What modules and optimizers return: nested dicts of tensors and any values, by names or numbers.
StateDict = dict[Any, Any]
Target = Callable[[StoredTensor], torch.Tensor]


def split_state(state: StateDict) -> tuple[dict[Keys, torch.Tensor], StateDict]:
    """Return the tensors in nested dicts by their keys, and the same dicts without them."""
    tensors: dict[Keys, torch.Tensor] = {}
    return tensors, _without_tensors(state, (), tensors)


def _without_tensors(state: StateDict, above: Keys, tensors: dict[Keys, torch.Tensor]) -> StateDict:
    # A shallow copy keeps what hangs on a state dict besides its items, such as versions of its layers.
    rest = copy.copy(state)
    for key, value in state.items():
        keys = (*above, key)
        if isinstance(value, torch.Tensor):
            tensors[keys] = value.detach()
            del rest[key]
        elif isinstance(value, dict):
            rest[key] = _without_tensors(value, keys, tensors)
    return rest


def whole(stored: StoredTensor) -> torch.Tensor:
    """Return room for all of a tensor."""
    return torch.empty(stored.shape, dtype=stored.dtype)


def load_shards(folder: Path, target: Target = whole, opened: Mapping[str, BinaryIO] | None = None) -> StateDict:
    """Return a state whose tensors are those that ``target`` gives, filled with what belongs to this rank.

    ``opened`` are the folder's files by name where they are open already.
    """
    with reported_as_unreadable(folder, _WHAT):
        files = _Files(folder, opened)
        with files.open(VALUES) as file:
            values = load_tensors(folder / VALUES, file)
        if not isinstance(values, dict):
            raise ValueError(f"{VALUES} must hold a dict")
        state: StateDict = values
        with files.open(INDEX) as file:
            file.seek(0)
            content = file.read()
        # All sizes and places are checked here, before the first tensor is allocated.
        for stored in parse_index(content, files.sizes()):
            tensor = target(stored)
            files.fill(tensor, stored)
            *parents, last = stored.path
            place = state
            for key in parents:
                place = place.setdefault(key, {})
            place[last] = tensor
        return state


def load_state(path: Path) -> Any:
    """Read the whole state of a module or an optimizer: a folder of shards, or a file of weights of any kind."""
    return load_shards(path) if path.is_dir() else load_weights(path)


def file_sizes(folder: Path) -> dict[str, int]:
    """Return how large the files of a folder are; links lead elsewhere and are none of them."""
    return {path.name: regular_size(path) for path in folder.iterdir() if path.is_file() and not path.is_symlink()}


class _Files:
    """The files of a folder of shards, opened when they are read unless they are open already."""

    def __init__(self, folder: Path, opened: Mapping[str, BinaryIO] | None) -> None:
        self._folder = folder
        self._opened = opened

    def open(self, name: str) -> AbstractContextManager[BinaryIO]:
        return opened_file(self._folder / name) if self._opened is None else nullcontext(self._opened[name])

    def sizes(self) -> dict[str, int]:
        if self._opened is None:
            return file_sizes(self._folder)
        return {name: file.seek(0, io.SEEK_END) for name, file in self._opened.items()}

    def fill(self, tensor: torch.Tensor, stored: StoredTensor) -> None:
        """Copy the pieces that overlap with this rank's part of a tensor into it."""
        if tuple(tensor.shape) != stored.shape:
            raise ValueError(f"{stored.path} has the shape {stored.shape} instead of {tuple(tensor.shape)}")
        tensor = tensor.detach()
        local = local_part(tensor)
        start: tuple[int, ...] = (0,) * tensor.dim()
        if local is not tensor:
            (chunk,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
            start = tuple(chunk.offsets)
        for piece in stored.pieces:
            overlap = _find_overlap((start, tuple(local.shape)), (piece.offsets, piece.shape))
            if overlap is None:
                continue
            with self.open(piece.file) as file:
                file.seek(piece.start)
                content = io.BytesIO(file.read(piece.length))
            values = load_tensors(self._folder / piece.file, content)
            is_tensor = isinstance(values, torch.Tensor)
            if not is_tensor or (tuple(values.shape), values.dtype) != (piece.shape, stored.dtype):
                raise ValueError(f"a piece of {stored.path} in {piece.file} is not what the index says")
            here, there = overlap
            local[here].copy_(values[there])


Box = tuple[tuple[int, ...], tuple[int, ...]]
Slices = tuple[slice, ...]


def _find_overlap(ours: Box, theirs: Box) -> tuple[Slices, Slices] | None:
    """Return the part that two boxes, given by offsets and shapes, have in common, as slices of each of them."""
    here = list[slice]()
    there = list[slice]()
    for offset, length, other, other_length in zip(*ours, *theirs, strict=True):
        start = max(offset, other)
        end = min(offset + length, other + other_length)
        if start >= end:
            return None
        here.append(slice(start - offset, end - offset))
        there.append(slice(start - other, end - other))
    return tuple(here), tuple(there)


def num_bytes(state: StateDict) -> int:
    """Return what a state takes on disk, on all ranks together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in split_state(state)[0].values())


def names_in(folder: Path) -> list[str]:
    """Return the modules of a weight pool, whether they are files or folders of shards."""
    return sorted(path.stem for path in folder.glob("*") if path.suffix == ".pt" or (path / INDEX).is_file())
