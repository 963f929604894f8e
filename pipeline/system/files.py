"""Files that other programs may have put something into.

Reading never hangs on a pipe and never takes more memory than expected; writing never leaves half a text.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import PipelineError, StateConflict, UsageError
from pipeline.system.disk import Writer

MAX_BYTES = 64 << 20
# How much of a log is read to show its last lines; the log of a long run may be large.
_TAIL_BYTES = 1 << 16


def regular_size(path: Path) -> int:
    """Return the size of a regular file; raise OSError for anything else."""
    # stat before open: opening a pipe waits for a writer, possibly for ever.
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return status.st_size


def read_regular(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file; raise OSError if it is something else or too large."""
    if regular_size(path) > max_bytes:
        raise OSError(errno.EFBIG, f"Larger than {max_bytes} bytes", str(path))
    return path.read_bytes()


def replace_text(path: Path, text: str) -> None:
    """Replace a file by a text in one rename; after a failure the old file is still there."""
    # Next to its target, so that the rename stays on one file system.
    staging = path.with_name(f".{path.name}.new")
    # Do not write into what may already have this name: a link leads elsewhere, a pipe would hang.
    staging.unlink(missing_ok=True)
    try:
        staging.write_text(text, encoding="utf-8")
        os.replace(staging, path)
    except OSError:
        with contextlib.suppress(OSError):
            staging.unlink(missing_ok=True)
        raise


def num_bytes(folder: Path) -> int:
    """Return the size of all files in a folder; a file with several hard links counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                status = (Path(path) / name).lstat()
            except FileNotFoundError:
                # A live run replaces its files all the time.
                continue
            sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines of a log; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return lines[-count:] if count else []


def check_output(path: Path, suffixes: Sequence[str], *, may_replace: bool) -> None:
    """Refuse an ``--out`` that cannot be written, before any work is done for it."""
    if path.suffix not in suffixes:
        raise UsageError(f"--out must end in {', '.join(suffixes)}, but is {str(path)!r} instead.")
    if not path.parent.is_dir():
        raise UsageError(f"The folder of --out must exist, but {path.parent} does not.", f"mkdir -p {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"The folder of --out must be writable, but {path.parent} is not.")
    if path.is_dir():
        raise UsageError(f"--out must name a file, but {path} is a folder.")
    if path.exists() and not may_replace:
        raise StateConflict(f"{path} exists already.\n  fix: choose another name, or replace it with --force.")


def write_output(path: Path, writer: Writer) -> int:
    """Write a file next to its target and rename it; return its size."""
    # With the process id, because two commands may write the same target at once. The last rename wins.
    staging = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        staging.unlink(missing_ok=True)
        with staging.open("xb") as file:
            writer(file)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        os.replace(staging, path)
    except (OSError, RuntimeError) as error:
        # torch reports a failed write as a RuntimeError of several lines, without strerror.
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise PipelineError(f"{path} could not be written: {reason}.") from error
    finally:
        staging.unlink(missing_ok=True)
    return size
