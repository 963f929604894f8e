"""What tells a process from every other one, also from a later one with its number."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pipeline.arguments import has_launcher


def process_mark(pid: Any) -> str | None:
    """Return what no other process has or will have; None if it is gone."""
    fields = _content(Path(f"/proc/{pid}/stat")).rpartition(b")")[2].split()
    if not fields or fields[0] == b"Z":
        return None
    boot = _content(Path("/proc/sys/kernel/random/boot_id")).decode().strip()
    return f"{boot} {fields[19].decode()}"


def launcher_mark() -> str | None:
    """Return what tells this process's torchrun from every other one; None where there is none."""
    mark = process_mark(os.getppid()) if has_launcher() else None
    return mark and f"{mark} {os.getppid()}"


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
