"""Pictures as PNG files, written with the standard library alone."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import torch

SIGNATURE = b"\x89PNG\r\n\x1a\n"
_COLOURS = {1: 0, 3: 2}


def png_of(picture: Any) -> bytes:
    """Return an array, a tensor or a figure as the bytes of a PNG file.

    Arrays are height × width, or with one or three channels at either end; floats range from 0 to 1.
    """
    if hasattr(picture, "savefig"):
        buffer = io.BytesIO()
        picture.savefig(buffer, format="png")
        return buffer.getvalue()
    if isinstance(picture, torch.Tensor):
        picture = picture.detach().float().cpu().numpy() if picture.is_floating_point() else picture.cpu().numpy()
    return _encoded(_as_bytes(_channels_last(np.asarray(picture))))


def size_of(png: bytes) -> tuple[int, int]:
    """Return width and height of a PNG file."""
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def _channels_last(array: np.ndarray) -> np.ndarray:
    shown = array[..., None] if array.ndim == 2 else array
    if shown.ndim == 3 and shown.shape[-1] not in _COLOURS and shown.shape[0] in _COLOURS:
        shown = np.moveaxis(shown, 0, -1)
    if shown.ndim != 3 or shown.shape[-1] not in _COLOURS or not shown.size:
        raise ValueError(f"an image must be height × width, or have 1 or 3 channels, but has the shape {array.shape}")
    return shown


def _as_bytes(array: np.ndarray) -> np.ndarray:
    if array.dtype == np.uint8:
        return array
    if array.dtype == np.bool_ or np.issubdtype(array.dtype, np.floating):
        shown: np.ndarray = (np.nan_to_num(array.astype(np.float64)).clip(0, 1) * 255).round().astype(np.uint8)
        return shown
    raise ValueError(f"an image must hold bytes (uint8), or floats from 0 to 1, but holds {array.dtype}")


def _encoded(array: np.ndarray) -> bytes:
    height, width, channels = array.shape
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
    # Each row begins with the number of its filter, which is none.
    rows = b"".join(b"\0" + row.tobytes() for row in array)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return SIGNATURE + b"".join(_chunk(kind, content) for kind, content in chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
