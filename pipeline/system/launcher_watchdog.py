"""The end of a torchrun that cannot end itself: it asks a machine that is gone, and would wait a quarter of an hour."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pipeline.arguments import has_launcher

SECONDS_TO_LEAVE = 15
_SECONDS_BETWEEN_LOOKS = 0.2


def may_start_again() -> bool:
    """Return whether torchrun would start this process again."""
    names = ("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT")
    most, so_far = (int(os.environ.get(name, "0")) for name in names)
    return so_far < most


def end_launcher_later() -> None:
    """Have torchrun killed if it is still there some seconds after this process, which must leave now."""
    launcher = os.getppid()
    line = [sys.executable, "-m", __name__, str(launcher), str(process_mark(launcher))]
    subprocess.Popen(line, stdin=subprocess.DEVNULL, start_new_session=True)


def main(pid: int, mark: str) -> None:
    limit = time.monotonic() + SECONDS_TO_LEAVE
    while process_mark(pid) == mark:
        if time.monotonic() > limit:
            print("torchrun waits for a machine that is gone, and is killed.", file=sys.stderr)
            os.kill(pid, signal.SIGKILL)
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def process_mark(pid: Any) -> str | None:
    """Return what no other process has or will have; None if it is gone."""
    fields = _content(Path(f"/proc/{pid}/stat")).rpartition(b")")[2].split()
    if not fields or fields[0] == b"Z":
        return None
    boot = _content(Path("/proc/sys/kernel/random/boot_id")).decode().strip()
    return f"{boot} {fields[19].decode()}"


def launcher_mark() -> str | None:
    """Return what identifies this process's torchrun; None without one."""
    mark = process_mark(os.getppid()) if has_launcher() else None
    return mark and f"{mark} {os.getppid()}"


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
