"""What the header of a safetensors file says, compared with the file before anything is allocated."""

from __future__ import annotations

import json
import math
import struct
from typing import Any, BinaryIO

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000
_MAX_DIMENSIONS = 64
_METADATA = "__metadata__"
_ITEM_BYTES = {
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
}


def check_header(file: BinaryIO, size: int) -> None:
    """Raise ValueError unless every tensor has its own bytes and the file has no others."""
    start = file.read(_LENGTH.size)
    if len(start) < _LENGTH.size:
        raise ValueError("it is cut off")
    (length,) = _LENGTH.unpack(start)
    num_bytes = size - _LENGTH.size - length
    if length > _MAX_HEADER_BYTES or num_bytes < 0:
        raise ValueError(f"its header claims {length} bytes, and the whole file has {size}")
    header = _parse(file.read(length))
    header.pop(_METADATA, None)
    end = 0
    for begin, stop in sorted(_extent(name, entry) for name, entry in header.items()):
        if begin != end:
            raise ValueError("its tensors overlap or leave gaps")
        end = stop
    if end != num_bytes:
        raise ValueError(f"its tensors claim {end} bytes, but it has {num_bytes}")


def _parse(content: bytes) -> dict[str, Any]:
    try:
        header = json.loads(content.decode(), object_pairs_hook=_without_doubles)
    except (RecursionError, ValueError) as error:
        raise ValueError("its header is not valid JSON") from error
    if not isinstance(header, dict):
        raise ValueError("its header is not a list of tensors")
    return header


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("two entries of the same name")
    return dict(pairs)


def _extent(name: str, entry: Any) -> tuple[int, int]:
    """Return where a tensor's bytes are, once they are as many as its type and shape need."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"its entry {name!r} describes no tensor")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in _ITEM_BYTES:
        raise ValueError(f"tensor {name!r} has the unknown type {entry['dtype']!r}")
    shape = entry["shape"]
    offsets = entry["data_offsets"]
    if not (_are_lengths(shape) and _are_lengths(offsets)) or len(offsets) != 2 or len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"tensor {name!r} has no proper shape or place")
    if math.prod(shape) * _ITEM_BYTES[entry["dtype"]] != offsets[1] - offsets[0]:
        raise ValueError(f"tensor {name!r} of shape {shape} cannot have {offsets[1] - offsets[0]} bytes")
    return offsets[0], offsets[1]


def _are_lengths(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)
