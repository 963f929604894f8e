"""The index of a folder of shards: which tensors it holds, and where the pieces of each are.

torch keeps the same in a pickle, which this program writes but never reads: an index in JSON can be checked against the
files before anything is allocated, and runs no code.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.serialization.npz_files import is_entry_name

FORMAT = 1
_MAX_DIMENSIONS = 64
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
Keys = tuple[str | int, ...]


@dataclass(frozen=True)
class Piece:
    """One process's part of a tensor, and where in which file it is."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a state: its place in the state's nested dicts, what it is, and its pieces."""

    path: Keys
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> StoredTensor:
        pieces = tuple(
            Piece(_lengths(offsets), _lengths(shape), str(file), *_lengths([start, length]))
            for offsets, shape, file, start, length in entry["pieces"]
        )
        path = tuple(entry["path"])
        if not path or any(type(key) not in (str, int) for key in path) or entry["dtype"] not in _DTYPES:
            raise ValueError("its index describes something that is not a tensor")
        return cls(path, _DTYPES[entry["dtype"]], _lengths(entry["shape"]), pieces)

    def check(self) -> None:
        """Raise ValueError unless the pieces make up the whole tensor, and have the bytes for that."""
        for piece in self.pieces:
            if not len(piece.offsets) == len(piece.shape) == len(self.shape):
                raise ValueError(f"a piece of tensor {self.path} has another number of dimensions")
            ends = zip(piece.offsets, piece.shape, self.shape, strict=True)
            if any(offset + length > size for offset, length, size in ends):
                raise ValueError(f"a piece of tensor {self.path} lies outside of it")
            if math.prod(piece.shape) * self.dtype.itemsize > piece.length:
                raise ValueError(f"a piece of tensor {self.path} claims more than its {piece.length} bytes")
        if sum(math.prod(piece.shape) for piece in self.pieces) != math.prod(self.shape):
            raise ValueError(f"the pieces of tensor {self.path} do not make up its shape {self.shape}")


def _lengths(value: list[Any]) -> tuple[int, ...]:
    # A bool is an int for isinstance, but not in an index.
    if len(value) > _MAX_DIMENSIONS or any(type(length) is not int or length < 0 for length in value):
        raise ValueError("its index has a tensor without a proper shape or place")
    return tuple(value)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor; of one that is not sharded, all of it."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def is_sharded(tensor: torch.Tensor) -> bool:
    # Recognised by what it can do: to import its class makes torch take half as long again to start.
    return hasattr(tensor, "to_local")


def parse_index(content: bytes, sizes: Mapping[str, int]) -> list[StoredTensor]:
    """Return the tensors of a folder, or raise ValueError if they claim what its files, of these sizes, do not have."""
    value = json.loads(content)
    if not isinstance(value, dict) or value.get("format") != FORMAT or not isinstance(value.get("tensors"), list):
        raise ValueError(f"its index must have format {FORMAT}")
    try:
        tensors = [StoredTensor.from_json(entry) for entry in value["tensors"]]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError("its index is damaged") from error
    for tensor in tensors:
        tensor.check()
    if len({tensor.path for tensor in tensors}) < len(tensors):
        raise ValueError("its index names a tensor twice")
    claimed: Counter[str] = Counter()
    for piece in (piece for tensor in tensors for piece in tensor.pieces):
        if not is_entry_name(piece.file) or piece.file not in sizes:
            raise ValueError(f"its index names the file {piece.file!r}, which is not there")
        claimed[piece.file] += piece.length
        if piece.start + piece.length > sizes[piece.file]:
            raise ValueError(f"its file {piece.file} is cut off")
    # Each piece may fit its file while many share the same bytes: a small folder would fill the memory.
    for file, num_bytes in claimed.items():
        if num_bytes > sizes[file]:
            raise ValueError(f"its index claims {num_bytes} bytes of {file}, which has {sizes[file]}")
    return tensors
