"""Files where others may have put something: never a pipe that hangs, never more than fits, never half a text."""

from __future__ import annotations

import contextlib
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


def replace_text(path: Path, text: str) -> None:
    """Put a text in place of a file as a whole; a failure leaves what was there."""
    # Beside its target, so that the rename stays on one file system.
    staging = path.with_name(f".{path.name}.new")
    # Whatever stands there is not to be written through: a link leads elsewhere, a pipe would hang.
    staging.unlink(missing_ok=True)
    try:
        staging.write_text(text, encoding="utf-8")
        os.replace(staging, path)
    except OSError:
        with contextlib.suppress(OSError):
            staging.unlink(missing_ok=True)
        raise
