"""Pictures as PNG files, written with the standard library alone."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import torch

SIGNATURE = b"\x89PNG\r\n\x1a\n"
# The colour types of the format by the number of channels.
_COLOURS = {1: 0, 3: 2}


def png_of(picture: object) -> bytes:
    """Return an array, a tensor or a figure as the bytes of a PNG file.

    Arrays are height × width, or with one or three channels at either end; floats range from 0 to 1.
    """
    if hasattr(picture, "savefig"):
        buffer = io.BytesIO()
        picture.savefig(buffer, format="png")
        return buffer.getvalue()
    if isinstance(picture, torch.Tensor):
        # numpy has no bfloat16.
        picture = picture.detach().float().cpu().numpy() if picture.is_floating_point() else picture.cpu().numpy()
    pixels = _as_pixels(np.asarray(picture))
    height, width, channels = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
    # Each row begins with the number of its filter, which is none.
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    png = SIGNATURE
    for kind, content in ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        checksum = zlib.crc32(kind + content)
        png += struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)
    return png


def size_of(png: bytes) -> tuple[int, int]:
    """Return width and height of a PNG file."""
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def _as_pixels(array: np.ndarray) -> np.ndarray:
    """Return an array as bytes of height × width × channels."""
    pixels = array[..., None] if array.ndim == 2 else array
    if pixels.ndim == 3 and pixels.shape[-1] not in _COLOURS and pixels.shape[0] in _COLOURS:
        pixels = np.moveaxis(pixels, 0, -1)
    if pixels.ndim != 3 or pixels.shape[-1] not in _COLOURS or not pixels.size:
        raise ValueError(f"an image must be height × width, or have 1 or 3 channels, but has the shape {array.shape}")
    if pixels.dtype == np.bool_ or np.issubdtype(pixels.dtype, np.floating):
        pixels = (np.nan_to_num(pixels.astype(np.float64)).clip(0, 1) * 255).round().astype(np.uint8)
    if pixels.dtype != np.uint8:
        raise ValueError(f"an image must hold bytes (uint8), or floats from 0 to 1, but holds {array.dtype}")
    return pixels
