"""Looking at files that a live run keeps changing."""

from __future__ import annotations

import os
from pathlib import Path

_TAIL_BYTES = 1 << 16


def num_bytes(folder: Path) -> int:
    """Return what a folder takes, each file once however many names it has."""
    sizes: dict[tuple[int, int], int] = {}
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                found = (Path(path) / name).lstat()
            except FileNotFoundError:
                # A live run replaces its files all the time.
                continue
            sizes[found.st_dev, found.st_ino] = found.st_size
    return sum(sizes.values())


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines of a log, or none if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return lines[-count:] if count else []
