"""Files that mean harm: pickles that run code, tensors and arrays of absurd shapes, bombs."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Call:
    """Pickles as the call of a function."""

    callee: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return self.callee, self.arguments


@dataclass(frozen=True)
class Stored:
    """Pickles as a storage of floats that claims a number of elements; the file has four."""

    num_items: int
    key: str = "0"


@dataclass(frozen=True)
class Tensor:
    """Pickles as a tensor over a storage, of any size and stride, with a state that is set afterwards."""

    storage: Stored
    size: tuple[int, ...]
    stride: tuple[int, ...] = (1,)
    offset: int = 0
    state: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        hooks: OrderedDict[str, Any] = OrderedDict()
        arguments = (self.storage, self.offset, self.size, self.stride, False, hooks)
        made = torch._utils._rebuild_tensor_v2, arguments
        return made if self.state is None else (*made, self.state)


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Stored):
            return "storage", torch.FloatStorage, value.key, "cpu", value.num_items
        return None


def save_hostile(path: Path, value: Any) -> None:
    """Write a file as torch.save does, with one storage of four floats and ``value`` as its weight."""
    torch.save({"weight": torch.ones(4)}, path)
    buffer = io.BytesIO()
    _Pickler(buffer, 2).dump({"weight": value})
    repacked(path, {"data.pkl": buffer.getvalue()})


def repacked(path: Path, changed: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> None:
    """Write an archive anew with the content of some entries changed, named without their folder."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in entries.items():
            archive.writestr(name, changed.get(name.partition("/")[2], content))


def compressed(path: Path) -> None:
    """Write an archive anew with every entry compressed, as bombs are."""
    repacked(path, {}, zipfile.ZIP_DEFLATED)


def absurd_arrays(path: Path, names: Iterable[str], dtype: str, shape: tuple[int, ...]) -> None:
    """Write an npz file whose arrays claim a type and a shape over 32 bytes each."""
    header = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}}}\n".encode()
    content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + b"\0" * 32
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(f"{name}.npy", content)
