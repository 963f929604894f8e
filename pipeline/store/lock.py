"""The run lock: at most one run is alive in an experiment, and only that one can write.

Two things guard an experiment. The kernel's lock on ``run.lock`` keeps a second run away; it is freed when its
owner dies, however it dies. The claim, a folder of the run's own in ``temp_data/``, is the fence: every commit is
renamed out of it, and a run that takes over moves it away first. So a run that was believed dead, because it was
stopped or on a machine that could not be reached, finds at its next write that it has nothing to write with.

Without a kernel lock, or with one that other machines do not see, the claim alone decides: its owner increments a
counter in it, and an owner whose counter grows is alive. Nothing here compares clocks.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
import uuid
import weakref
from functools import partial
from pathlib import Path

from filelock import FileLock, Timeout

from pipeline.command_lines import verb_line
from pipeline.errors import PipelineError, StateConflict
from pipeline.paths import ExperimentPaths
from pipeline.store.manifest import JsonObject
from pipeline.system.disk import Disk, bytes_writer, json_writer
from pipeline.system.files import read_regular
from pipeline.system.launcher_watchdog import process_mark
from pipeline.system.logging import LOGGER

HEARTBEAT_SECONDS = 3.0
# A run that misses so many is taken for dead; a busy file server may delay some of them.
MAX_MISSED_HEARTBEATS = 5
_OWNER_FILE = "owner.json"
_HEARTBEAT_FILE = "beat"
_STOP_FILE = "stop.request"
_PREFIX = "claim_"
# A check whether a run is alive holds the lock for an instant, which must not be taken for a run.
_SECONDS_FOR_READERS = 0.5
# What file systems answer that have no locks.
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


class Claim:
    """A run's folder in ``temp_data/``: what it writes there can become a commit, as long as the folder is there."""

    def __init__(self, paths: ExperimentPaths) -> None:
        self._paths = paths
        self.folder = paths.temp_data / f"{_PREFIX}{uuid.uuid4().hex[:12]}"

    @property
    def stop_file(self) -> Path:
        """Where the run is asked to stop: a request is for this run alone and ends with it."""
        return self.folder / _STOP_FILE

    def check(self) -> None:
        """Stop a run that has lost its experiment before it writes anything."""
        if self.folder.is_dir():
            return
        if not self._paths.temp_data.is_dir():
            raise PipelineError(
                f"The results folder {self._paths.results} has vanished or was emptied while the run was alive.\n"
                "  fix: restore it, then run again with --auto."
            )
        raise StateConflict(
            f"This run has lost experiment {self._paths.name!r}: it was taken over by {_describe_owner(self._paths)}.\n"
            "  It stops without writing; the other run continues."
        )


class RunLock:
    """Held by rank zero for the whole run."""

    def __init__(self, paths: ExperimentPaths, disk: Disk | None = None) -> None:
        self._paths = paths
        self._disk = disk or Disk()
        self._lock = _kernel_lock(paths)
        self.claim = Claim(paths)
        self._has_ended = threading.Event()
        # A lock that is dropped without release(), as after an error, must not look alive for ever.
        weakref.finalize(self, self._has_ended.set)

    def acquire(self) -> None:
        """Take the lock or refuse, naming who holds it."""
        has_kernel_lock = self._take_kernel_lock()
        try:
            for folder in _claims(self._paths):
                if _is_alive(folder, has_kernel_lock):
                    raise StateConflict(_describe_use(self._paths))
            self._write_claim()
        except BaseException as error:
            self._lock.release()
            # A reset moves the results away in one rename. Any operation of this run may be the one that notices.
            if isinstance(error, PipelineError) and not self._paths.lock_file.exists():
                raise self._refusal_of_reset() from error
            raise

    def _refusal_of_reset(self) -> StateConflict:
        """Return the refusal of an experiment whose results another run has moved away at this moment."""
        owner = read_json(self._paths.trash / self._paths.lock_file.name)
        by = f"pid {owner['pid']} on host {owner.get('host', '?')}" if owner.get("pid") else "another run"
        return StateConflict(f"Experiment {self._paths.name!r} is being reset by {by} at this moment; try again.")

    def _take_kernel_lock(self) -> bool:
        """Take the kernel's lock; return whether the file system has locks."""
        try:
            self._lock.acquire(timeout=_SECONDS_FOR_READERS, poll_interval=0.01)
        except Timeout:
            raise StateConflict(_describe_use(self._paths)) from None
        except (NotImplementedError, OSError) as error:
            if isinstance(error, FileNotFoundError):
                raise self._refusal_of_reset() from error
            if getattr(error, "errno", errno.ENOSYS) not in _NO_LOCKS:
                raise PipelineError(
                    f"{self._paths.lock_file} must be a file that can be locked, but: {error}.\n"
                    "  fix: remove it if no run is alive."
                ) from error
            LOGGER.warning(
                "The file system of %s has no locks (%s); a second run is detected by its heartbeat only.",
                self._paths.results,
                error,
            )
            return False
        return True

    def _write_claim(self) -> None:
        """Set up the claim and take away all others, each in one rename, before anything is read."""
        owner = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process": process_mark(os.getpid()),
            "started": time.strftime("%Y-%m-%d %H:%M:%S%z"),
            "job": os.environ.get("SLURM_JOB_ID"),
        }
        self._disk.make_scratch_folder(self.claim.folder, self._paths.results)
        self._disk.write(self.claim.folder / _OWNER_FILE, json_writer(owner))
        self._disk.write(self.claim.folder / _HEARTBEAT_FILE, bytes_writer(_heartbeat(0)))
        # From the rename on, the former owner can commit nothing any more. Its folder is removed at leisure.
        for entry in sorted(self._paths.temp_data.iterdir()):
            if entry != self.claim.folder:
                self._disk.rename(entry, self.claim.folder / f"taken_{entry.name}")
                self._disk.remove_tree(self.claim.folder / f"taken_{entry.name}")
        # Two runs that took each other's claim are both refused here.
        self.claim.check()
        lock_file = self._paths.lock_file
        # In place: a rename would put another file in the place of the one that the kernel has locked.
        self._disk.perform("write", lock_file, partial(lock_file.write_text, json.dumps(owner) + "\n"))
        for path in self._paths.left_behind():
            self._disk.remove_tree(path)
        arguments = (self.claim.folder / _HEARTBEAT_FILE, self._has_ended)
        threading.Thread(target=_heartbeat_loop, args=arguments, name="heartbeat", daemon=True).start()

    def release(self) -> None:
        """Give the experiment back, if it was held; what cannot be removed is left to the next run."""
        self._has_ended.set()
        with contextlib.suppress(PipelineError):
            if self.claim.folder.is_dir():
                self._disk.remove_tree(self.claim.folder)
        self._lock.release()


def _kernel_lock(paths: ExperimentPaths) -> FileLock:
    return FileLock(paths.lock_file, fallback_to_soft=False)


def _heartbeat_loop(beat_file: Path, has_ended: threading.Event) -> None:
    number = 0
    while not has_ended.wait(HEARTBEAT_SECONDS):
        number += 1
        try:
            with beat_file.open("r+b") as file:
                file.write(_heartbeat(number))
        except FileNotFoundError:
            # Taken over, or removed with the whole experiment: the next commit will say so.
            return
        except OSError:
            # A file system that fails for a while must not end the heartbeat of a living run.
            continue


def _heartbeat(number: int) -> bytes:
    """Return a heartbeat of fixed width, so that it is replaced in one small write."""
    return b"%012d\n" % number


def _claims(paths: ExperimentPaths) -> list[Path]:
    return sorted(paths.temp_data.glob(f"{_PREFIX}*")) if paths.temp_data.is_dir() else []


def _is_alive(folder: Path, has_kernel_lock: bool) -> bool:
    """Return whether the owner of a claim lives: by the process table on this host, by its heartbeat elsewhere."""
    owner = read_json(folder / _OWNER_FILE)
    if owner.get("host") == socket.gethostname():
        # The kernel's lock was free, so a process of this host that held it is dead, even if its pid is in use again.
        return not has_kernel_lock and _is_running(owner)
    if not owner:
        return False
    LOGGER.warning(
        "A previous run on host %s left no exit record; waiting up to 15 s for its heartbeat.", owner.get("host", "?")
    )
    return _is_beating(folder / _HEARTBEAT_FILE)


def _is_running(owner: JsonObject) -> bool:
    # The mark says which process had the pid: another one may have it by now.
    return owner.get("process") is not None and owner["process"] == process_mark(owner.get("pid"))


def _is_beating(path: Path) -> bool:
    first = _read_heartbeat(path)
    # Counted by this machine's own clock: another one may be wrong by any amount.
    limit = time.monotonic() + MAX_MISSED_HEARTBEATS * HEARTBEAT_SECONDS
    while time.monotonic() < limit:
        time.sleep(HEARTBEAT_SECONDS / 4)
        if _read_heartbeat(path) != first:
            return True
    return False


def _read_heartbeat(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def is_held(paths: ExperimentPaths) -> bool:
    """Return whether a run is alive on this file system's word, changing nothing on disk."""
    if not paths.lock_file.exists():
        return False
    lock = _kernel_lock(paths)
    try:
        lock.acquire(timeout=_SECONDS_FOR_READERS / 5, poll_interval=0.005)
    except Timeout:
        return True
    except (NotImplementedError, OSError) as error:
        if getattr(error, "errno", errno.ENOSYS) not in _NO_LOCKS:
            return False
        return any(_is_running(read_json(folder / _OWNER_FILE)) for folder in _claims(paths))
    lock.release()
    return False


def find_stop_file(paths: ExperimentPaths) -> Path | None:
    """Return where the live run looks for a request, or None while it has no claim yet; a dead run's does not count."""
    claims = _claims(paths)
    living = [folder for folder in claims if _is_running(read_json(folder / _OWNER_FILE))]
    # Elsewhere, and in a container with processes of its own, the heartbeat decides.
    living = living or [folder for folder in claims if _is_beating(folder / _HEARTBEAT_FILE)]
    return living[0] / _STOP_FILE if living else None


def seconds_since_beat(paths: ExperimentPaths) -> float | None:
    """Return the age of the latest heartbeat by this machine's clock, or None without a claim."""
    ages = []
    for folder in _claims(paths):
        with contextlib.suppress(OSError):
            ages.append(time.time() - (folder / _HEARTBEAT_FILE).stat().st_mtime)
    return max(0.0, min(ages)) if ages else None


def check_free(paths: ExperimentPaths) -> None:
    """Refuse an experiment in which a run is alive."""
    if is_held(paths):
        raise StateConflict(_describe_use(paths))


def read_owner(paths: ExperimentPaths) -> JsonObject:
    """Return what the latest owner said of itself."""
    return read_json(paths.lock_file)


def read_json(path: Path) -> JsonObject:
    """Return a small JSON object, or nothing if there is none that can be read."""
    try:
        value = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _describe_owner(paths: ExperimentPaths) -> str:
    owner = read_owner(paths)
    job = f", job {owner['job']}" if owner.get("job") else ""
    return f"pid {owner.get('pid', '?')} on host {owner.get('host', '?')}{job}, since {owner.get('started', '?')}"


def _describe_use(paths: ExperimentPaths) -> str:
    return (
        f"Experiment {paths.name!r} is in use: held by {_describe_owner(paths)}.\n"
        f"  to look at that run: {verb_line('status', paths.name, paths.home)}\n"
        f"  to stop it cleanly:  {verb_line('stop', paths.name, paths.home)}"
    )
