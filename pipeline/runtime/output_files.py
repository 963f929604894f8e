"""Files that a verb writes where its user says: refused before the work, and written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import PipelineError, StateConflict, UsageError
from pipeline.runtime.durable import Writer


def check_output(path: Path, suffixes: Sequence[str], *, may_replace: bool) -> None:
    """Refuse a place that nothing could be written to, as long as nothing has been done."""
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
    """Write a file beside its target and rename it; return its size."""
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
        # torch tells of a failed write in an error of its own.
        told = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise PipelineError(f"{path} could not be written: {told}.") from error
    finally:
        staging.unlink(missing_ok=True)
    return size
