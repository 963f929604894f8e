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
    existing = paths.results
    while not existing.exists():
        existing = existing.parent
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PipelineError(
            f"Results cannot be written: {existing} is not writable.\n  fix: change its permissions or --data-home."
        )


def check_shared(paths: ExperimentPaths, processes: Processes, disk: Disk) -> None:
    """Refuse processes that do not see the same data home, by a token that rank zero writes and all must find."""

    def write_token() -> Path:
        check_writable(paths)
        token = paths.start_token(uuid.uuid4().hex)
        if not paths.top.is_dir():
            # A home of results may be as new as the experiment.
            disk.make_folder(paths.top)
        disk.perform("create", token, token.touch)
        # Relative, because machines may have the data home at different places.
        return token.relative_to(paths.top)

    token = processes.on_rank_zero(write_token)
    where = f"{paths.top} on host {socket.gethostname()}"
    seen = processes.gather(((paths.top / token).exists(), where))
    # No lock is held yet. A start that has it removes the tokens of all others, so rank zero may miss its own.
    if not seen[0][0]:
        raise StateConflict(f"Experiment {paths.name!r} is being started by another run at this moment.").shared()
    processes.on_rank_zero(disk.remove, paths.top / token)
    blind = [where for sees, where in seen if not sees]
    if blind:
        raise UsageError(
            f"All processes must see the same data home, but what rank 0 writes to {seen[0][1]} is not seen in "
            f"{', '.join(dict.fromkeys(blind))}.",
            "put it on a file system that all machines share, or name it with --data-home",
        ).shared()


def open_fresh(paths: ExperimentPaths, disk: Disk, lock: RunLock) -> None:
    """Create an empty results folder and hold its lock; what an interrupted start left behind is removed."""
    # First: a later start would take the trash of a killed reset for one to complete, and delete this run's logs.
    finish_reset(paths, disk)
    disk.make_folder(paths.results)
    lock.acquire()
    # Another run may have committed between the decision to start and the lock.
    if inspect_results(paths).exists:
        raise StateConflict(f"Experiment {paths.name!r} was just started by someone else.")
    # All but the lock that is held and the folder of its claim.
    for name in sorted(OWN_NAMES - {paths.lock_file.name, paths.temp_data.name}):
        if os.path.lexists(paths.results / name):
            disk.remove_tree(paths.results / name)
    for folder in (paths.data, paths.generations):
        disk.make_folder(folder)


def reset(paths: ExperimentPaths, disk: Disk, *, only_untrained: bool = False) -> None:
    """Delete results and logs; one rename decides, so a kill leaves the old experiment or none.

    With ``only_untrained``, results of a run that has trained since it was looked at are left alone.
    """
    finish_reset(paths, disk)
    if paths.results.exists():
        lock = RunLock(paths, disk)
        lock.acquire()
        progress = inspect_results(paths).progress
        if only_untrained and (progress is None or progress.has_trained):
            raise StateConflict(f"Experiment {paths.name!r} was just trained by another run.")
        disk.rename(paths.results, paths.trash)
        # The rename must be durable before anything is deleted: a power cut must not bring back half an experiment.
        disk.sync_folder(paths.trash.parent)
        lock.release()
        finish_reset(paths, disk)


def finish_reset(paths: ExperimentPaths, disk: Disk) -> None:
    """Complete a reset that has renamed the results away; its trash shows that one has begun."""
    if not paths.trash.exists():
        return
    # The logs before the trash: while the trash exists, the next start deletes the logs too.
    if paths.logs.is_dir():
        # The current torchrun has files open in LOG_DIR/RUN, which may lie below the logs. This variable leads there:
        # LOG_DIR/RUN/attempt_N/LOCAL_RANK/error.json
        error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        _clear(paths.logs.resolve(), Path(error_file).resolve().parents[2] if error_file else None, disk)
    if not disk.remove_tree(paths.trash):
        # As long as it has its name, every start would take it for a reset that is not complete.
        aside = paths.left_aside(uuid.uuid4().hex)
        disk.rename(paths.trash, aside)
        LOGGER.warning("%s holds files that a program on this machine has open; a later start removes it.", aside)
    LOGGER.info("Deleted the results and logs of %s.", paths.name)


def _clear(folder: Path, spared: Path | None, disk: Disk) -> None:
    """Remove everything in a folder except one folder somewhere below it."""
    for entry in sorted(folder.iterdir()):
        if spared is not None and entry in spared.parents:
            _clear(entry, spared, disk)
        elif entry != spared:
            disk.remove_tree(entry)
