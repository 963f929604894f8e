"""Making room for an experiment: a fresh results folder, or none where a reset was asked for."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path

from pipeline.distributed.processes import Processes
from pipeline.errors import PipelineError, StateConflict, UsageError
from pipeline.lifecycle.mode import OWN_NAMES, inspect_results
from pipeline.paths import ExperimentPaths
from pipeline.store.lock import RunLock
from pipeline.system.disk import Disk
from pipeline.system.logging import LOGGER


def check_writable(paths: ExperimentPaths) -> None:
    """Refuse before any work if results could not be written; the check itself leaves no trace."""
    existing = _nearest_existing(paths)
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PipelineError(
            f"Results cannot be written: {existing} is not writable.\n  fix: change its permissions or --data-home."
        )


def _nearest_existing(paths: ExperimentPaths) -> Path:
    existing = paths.results
    while not existing.exists():
        existing = existing.parent
    return existing


def check_shared(paths: ExperimentPaths, processes: Processes, disk: Disk) -> None:
    """Refuse processes that do not see the same data home, by a token that rank zero writes and all must find."""
    token = processes.on_rank_zero(lambda: _write_token(paths, disk))
    # Machines may have the data home at different places.
    seen = processes.gather(((paths.home / token).exists(), _place(paths)))
    if not seen[0][0]:
        raise StateConflict(f"Experiment {paths.name!r} is being started by another run at this moment.").shared()
    processes.on_rank_zero(lambda: disk.remove(paths.home / token))
    blind = [place for sees, place in seen if not sees]
    if blind:
        raise UsageError(
            f"All processes must see the same data home, but what rank 0 writes to {seen[0][1]} is not seen in "
            f"{', '.join(dict.fromkeys(blind))}.",
            "put it on a file system that all machines share, or name it with --data-home",
        ).shared()


def _write_token(paths: ExperimentPaths, disk: Disk) -> Path:
    check_writable(paths)
    token = paths.start_token(uuid.uuid4().hex)
    disk.perform("create", token, token.touch)
    return token.relative_to(paths.home)


def _place(paths: ExperimentPaths) -> str:
    return f"{paths.home} on host {socket.gethostname()}"


def open_fresh(paths: ExperimentPaths, disk: Disk, lock: RunLock) -> None:
    """Create an empty results folder and hold its lock; what an interrupted start left behind is removed."""
    finish_reset(paths, disk)
    disk.make_folder(paths.results)
    lock.acquire()
    if inspect_results(paths).exists:
        raise StateConflict(f"Experiment {paths.name!r} was just started by someone else.")
    for name in sorted(OWN_NAMES - {paths.lock_file.name, paths.temp_data.name}):
        if os.path.lexists(paths.results / name):
            disk.remove_tree(paths.results / name)
    for folder in (paths.data, paths.generations):
        disk.make_folder(folder)


def reset(paths: ExperimentPaths, disk: Disk) -> None:
    """Delete results and logs; one rename decides, so a kill leaves the old experiment or none."""
    finish_reset(paths, disk)
    if paths.results.exists():
        lock = RunLock(paths, disk)
        lock.acquire()
        disk.rename(paths.results, paths.trash)
        disk.sync_folder(paths.trash.parent)
        lock.release()
        finish_reset(paths, disk)


def finish_reset(paths: ExperimentPaths, disk: Disk) -> None:
    """Complete a reset that has renamed the results away; its trash shows that one has begun."""
    if not paths.trash.exists():
        return
    if paths.logs.is_dir():
        _clear(paths.logs.resolve(), _open_log_folder(), disk)
    if not disk.remove_tree(paths.trash):
        # As long as it has its name, every start would take it for a reset that is not complete.
        aside = paths.left_aside(uuid.uuid4().hex)
        disk.rename(paths.trash, aside)
        LOGGER.warning("%s holds files that a program on this machine has open; a later start removes it.", aside)
    LOGGER.info("Deleted the results and logs of %s.", paths.name)


def _clear(folder: Path, spared: Path | None, disk: Disk) -> None:
    """Remove all in a folder but one folder somewhere below it."""
    for entry in sorted(folder.iterdir()):
        if spared is not None and entry in spared.parents:
            _clear(entry, spared, disk)
        elif entry != spared:
            disk.remove_tree(entry)


def _open_log_folder() -> Path | None:
    """Return the folder into which the current torchrun writes: LOG_DIR/RUN/attempt_N/LOCAL_RANK/error.json."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(error_file).resolve().parents[2] if error_file else None
