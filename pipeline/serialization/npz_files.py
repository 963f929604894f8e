"""Archives of tensors or arrays, wherever they come from: opened without running code or filling the memory.

What an archive says of itself is compared with what the file holds before anything is allocated.
"""

from __future__ import annotations

import math
import os
import stat
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO

import numpy as np

from pipeline.errors import UnreadableFile
from pipeline.paths import is_inside
from pipeline.system.files import regular_size

_ZIP_START = b"PK\x03\x04"
_ZIP_END = b"PK\x05\x06"
_LARGE_ZIP_END = b"PK\x06\x06"
_LOCATOR = b"PK\x06\x07"
# Signature, length and place of the list of entries; in a large archive also the locator of this very record.
_END = struct.Struct("<4s8x2L2x")
_LARGE_END = struct.Struct("<4s36x2Q4s4xQ4x")
_PICKLE_START = b"\x80"
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_NUMBERS = "biufc"


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read every array of an npz file; raise UnreadableFile for one that is not safe to read."""
    with opened_archive(path, "arrays written by numpy.savez") as (file, archive):
        for entry in archive.infolist():
            _check_array(archive, entry)
        file.seek(0)
        with np.load(file, allow_pickle=False) as arrays:
            return dict(arrays.items())


@contextmanager
def columns_of(path: Path) -> Iterator[dict[str, np.ndarray]]:
    """Give the arrays of an npz file to code that knows what must be in it; what does not fit is reported as damage."""
    arrays = load_arrays(path)
    try:
        yield arrays
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UnreadableFile(f"{path} must hold the columns that were recorded, but {reason}.") from error


@contextmanager
def opened_archive(path: Path, what: str, opened: BinaryIO | None = None) -> Iterator[tuple[BinaryIO, zipfile.ZipFile]]:
    """Open an archive that is safe to look into; ``opened`` is the same file where it is open already."""
    with reported_as_unreadable(path, what), opened_file(path) if opened is None else nullcontext(opened) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        _check_frame(file, size)
        with zipfile.ZipFile(file) as archive:
            _check_entries(archive.infolist(), size)
            yield file, archive


def opened_file(path: Path) -> BinaryIO:
    """Open a regular file; anything else could hang."""
    regular_size(path)
    return path.open("rb")


@contextmanager
def reported_as_unreadable(path: Path, what: str) -> Iterator[None]:
    """Turn whatever is found wrong with a file into one sentence."""
    try:
        yield
    except OSError as error:
        raise UnreadableFile(f"{path} must be a file of {what}, but: {error.strerror or error}.") from error
    except Exception as error:
        # A file that is not an archive makes the readers raise almost anything.
        reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
        raise UnreadableFile(f"{path} must be a file of {what}, but {reason}.") from error


def _check_frame(file: BinaryIO, size: int) -> None:
    """Check that the file is one archive from its first byte to its last."""
    start = file.read(len(_ZIP_START))
    if start.startswith(_PICKLE_START):
        raise ValueError("it has torch's old format; load it once with torch and save it again with torch.save")
    if start != _ZIP_START:
        raise ValueError("it is not such a file")
    # Readers differ in where they look for the list of entries. They are sure to agree only where there is one place:
    # the last record ends the file, and the list ends where that record begins.
    end = size - _END.size
    file.seek(max(0, end - _LARGE_END.size))
    tail = file.read()
    is_framed = len(tail) >= _END.size
    if is_framed:
        signature, length, offset = _END.unpack(tail[-_END.size :])
        large = _LARGE_END.unpack(tail[: _LARGE_END.size]) if len(tail) == _LARGE_END.size + _END.size else None
        if large and large[3] == _LOCATOR:
            end -= _LARGE_END.size
            large_signature, length, offset, _, place = large
            is_framed = (large_signature, place) == (_LARGE_ZIP_END, end)
        is_framed = is_framed and signature == _ZIP_END and offset + length == end
    if not is_framed:
        raise ValueError("it is cut off, or something is hidden before or behind its end")


def _check_entries(entries: list[zipfile.ZipInfo], size: int) -> None:
    """Check that every entry is a plain file, and that none claims what the archive does not have."""
    if len({entry.filename for entry in entries}) < len(entries):
        raise ValueError("it holds two entries of the same name")
    for entry in entries:
        mode = entry.external_attr >> 16
        if stat.S_IFMT(mode) not in (0, stat.S_IFREG) or not is_entry_name(entry.filename):
            raise ValueError(f"its entry {entry.filename!r} is not a plain file inside it")
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise ValueError(f"its entry {entry.filename!r} is compressed and could unfold to any size")
    # Each entry may fit the file while several share the same bytes.
    declared = sum(entry.file_size for entry in entries)
    if declared > size:
        raise ValueError(f"its entries claim {declared} bytes, more than the {size} of the whole file")


def is_entry_name(name: str) -> bool:
    """Return whether a name stays inside an archive wherever that is unpacked."""
    return is_inside(name) and name.isprintable() and "\\" not in name


def _check_array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    """Compare what an array's header promises with the bytes behind it: numpy allocates before it reads them."""
    with archive.open(entry) as file:
        version = np.lib.format.read_magic(file)
        if version not in _HEADERS:
            raise ValueError(f"array {entry.filename!r} has the unknown version {version}")
        shape, _, dtype = _HEADERS[version](file)
        num_bytes = entry.file_size - file.tell()
    # A dtype without bytes would make any shape fit.
    if dtype.kind not in _NUMBERS or dtype.itemsize == 0:
        raise ValueError(f"array {entry.filename!r} must hold numbers, but holds {dtype}")
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != num_bytes:
        raise ValueError(f"array {entry.filename!r} of shape {shape} and {dtype} cannot have {num_bytes} bytes")
