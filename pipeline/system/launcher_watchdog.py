"""Watchdog that kills a torchrun which cannot end by itself, and marks that identify processes.

After a machine is lost, torchrun asks the store on that machine, without a time limit of its own. It would hang for a
quarter of an hour. The watchdog is a small process that outlives the worker that started it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from pipeline.command_lines import has_launcher

SECONDS_TO_LEAVE = 15
_SECONDS_BETWEEN_LOOKS = 0.2
_RUN_ID = "TORCHELASTIC_RUN_ID"


def may_start_again() -> bool:
    """Return whether torchrun has restarts left for this process."""
    num_restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    max_restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    return num_restarts < max_restarts


def end_launcher_later() -> None:
    """Start a watchdog that kills torchrun if it still runs some seconds after this process has ended."""
    launcher = os.getppid()
    command = [sys.executable, "-m", __name__, str(launcher), str(process_mark(launcher))]
    # There this package is found first, whatever the current folder has.
    root = Path(__file__).resolve().parents[2]
    # A session of its own: torchrun signals the process groups of its workers, and the watchdog must survive that.
    subprocess.Popen(command, cwd=root, stdin=subprocess.DEVNULL, start_new_session=True)


def kill_run(pid: int) -> None:
    """Kill a training process, its launcher, and all other processes that the launcher has started."""
    run_id = _variable_of(pid, _RUN_ID)
    victims = [pid]
    if run_id is not None:
        launcher = int(_read_or_empty(Path(f"/proc/{pid}/stat")).rpartition(b")")[2].split()[1])
        everyone = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        # The launcher first: it might start its processes again.
        victims = [launcher, *(other for other in everyone if _variable_of(other, _RUN_ID) == run_id)]
    for victim in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)


def _variable_of(pid: int, name: str) -> str | None:
    """Return an environment variable of another process."""
    for entry in _read_or_empty(Path(f"/proc/{pid}/environ")).split(b"\0"):
        key, _, value = entry.partition(b"=")
        if key == name.encode():
            return value.decode()
    return None


def main(pid: int, mark: str) -> None:
    """Wait for a launcher to end; kill it after ``SECONDS_TO_LEAVE``."""
    deadline = time.monotonic() + SECONDS_TO_LEAVE
    # Compared by mark in every round: once torchrun has ended, another process may get its number.
    while process_mark(pid) == mark:
        if time.monotonic() > deadline:
            print("torchrun still waits for a machine that is gone; killing it.", file=sys.stderr)
            os.kill(pid, signal.SIGKILL)
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def process_mark(pid: object) -> str | None:
    """Return a mark of a process on this machine that no later process with the same number has; None if it is gone."""
    # The second field is the program's name, which may contain spaces and parentheses: parse what follows the last one.
    fields = _read_or_empty(Path(f"/proc/{pid}/stat")).rpartition(b")")[2].split()
    # A zombie has ended; only its parent has not collected it yet.
    if not fields or fields[0] == b"Z":
        return None
    # Field 22 is the start time in ticks since boot; with the id of the boot it is unique.
    boot = _read_or_empty(Path("/proc/sys/kernel/random/boot_id")).decode().strip()
    return f"{boot} {fields[19].decode()}"


def launcher_mark() -> str | None:
    """Return what identifies the torchrun of this process; None without one."""
    mark = process_mark(os.getppid()) if has_launcher() else None
    # With the pid: two torchruns may have started in the same tick.
    return mark and f"{mark} {os.getppid()}"


def _read_or_empty(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
