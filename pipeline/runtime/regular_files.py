"""Reading files that others may have put in place: never a pipe that hangs, never more than fits."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MOST_BYTES = 64 << 20


def regular_size(path: Path) -> int:
    """Return the size of a regular file; raise OSError for all else, unopened because opening could hang."""
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return status.st_size


def read_regular(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return what a regular file holds, or raise OSError if it is something else or too large."""
    if regular_size(path) > most_bytes:
        raise OSError(errno.EFBIG, f"Larger than {most_bytes} bytes", str(path))
    return path.read_bytes()
