"""The run lock: at most one run is alive in an experiment."""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any

from filelock import FileLock, Timeout

from pipeline.errors import PipelineError, StateConflict
from pipeline.paths import ExperimentPaths
from pipeline.runtime.regular_files import read_regular


class RunLock:
    """Held by rank zero for the whole run; freed by the kernel when its owner dies."""

    def __init__(self, paths: ExperimentPaths) -> None:
        self._paths = paths
        self._lock = FileLock(paths.lock_file)

    def acquire(self) -> None:
        """Take the lock or refuse, naming who holds it."""
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            raise StateConflict(_in_use(self._paths)) from None
        except OSError as error:
            raise PipelineError(
                f"{self._paths.lock_file} must be a file that can be locked, but: {error.strerror}.\n"
                "  fix: remove it if no run is alive, or use a file system with locks."
            ) from error
        self._paths.lock_file.write_text(json.dumps(_this_owner()) + "\n")

    def release(self) -> None:
        self._lock.release()


def is_held(paths: ExperimentPaths) -> bool:
    """Tell whether a run is alive, changing nothing on disk."""
    if not paths.lock_file.exists():
        return False
    lock = FileLock(paths.lock_file)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return True
    except OSError:
        return False
    lock.release()
    return False


def check_free(paths: ExperimentPaths) -> None:
    if is_held(paths):
        raise StateConflict(_in_use(paths))


def read_owner(paths: ExperimentPaths) -> dict[str, Any]:
    """Return what the latest owner said of itself."""
    try:
        owner = json.loads(read_regular(paths.lock_file))
    except (OSError, ValueError, RecursionError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _this_owner() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S%z"),
        "job": os.environ.get("SLURM_JOB_ID"),
    }


def _in_use(paths: ExperimentPaths) -> str:
    owner = read_owner(paths)
    job = f", job {owner['job']}" if owner.get("job") else ""
    return (
        f"Experiment {paths.name!r} is in use: held by pid {owner.get('pid', '?')} on host "
        f"{owner.get('host', '?')}{job}, since {owner.get('started', '?')}.\n  fix: wait for that run, or stop it."
    )
