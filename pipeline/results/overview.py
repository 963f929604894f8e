"""All that can be told of an experiment from outside, without touching it and without torch."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from pipeline.paths import ExperimentPaths
from pipeline.results.history import History
from pipeline.results.journal import END, read_journal
from pipeline.results.launches import launch_facts
from pipeline.results.lock import read_owner, seconds_since_beat, shows_life
from pipeline.results.situation import look
from pipeline.results.starts import read_starts
from pipeline.results.status import read_status

FINISHED, RUNNING, STARTING, WAITING = "finished", "running", "starting", "waiting"
UNFINISHED, NEW = "unfinished", "new"
LIVE = (RUNNING, STARTING, WAITING)
_TAIL_BYTES = 1 << 16


def state_of(paths: ExperimentPaths) -> str:
    """Return one of finished, running, starting, waiting, unfinished, new."""
    situation = look(paths)
    if situation.is_finished:
        return FINISHED
    if shows_life(paths):
        return RUNNING
    if launch := launch_facts(paths):
        return WAITING if launch.get("after") and not _is_finished(paths, launch["after"]) else STARTING
    return UNFINISHED if situation.exists else NEW


def _is_finished(paths: ExperimentPaths, name: str) -> bool:
    return look(paths.other(name)).is_finished


def describe(paths: ExperimentPaths) -> dict[str, Any]:
    """Return what is known of one experiment: the committed state tells, the status file adds."""
    situation, state = look(paths), state_of(paths)
    status = read_status(paths.status_file) if situation.exists else {}
    is_running = state == RUNNING
    return {
        **status,
        "state": state,
        "committed": situation.progress.as_json() if situation.progress else None,
        "owner": read_owner(paths) if is_running else None,
        "launch": launch_facts(paths) or None,
        "seconds_since_sign_of_life": seconds_since_beat(paths) if is_running else None,
        "num_starts": len(read_starts(paths)) if situation.exists else 0,
        "ended": _last_end(paths) if state == UNFINISHED else None,
        "history": _curves(paths) if situation.exists else {},
        "disk": {"used": num_bytes(paths.results), "free": _free(paths.results)},
    }


def _last_end(paths: ExperimentPaths) -> dict[str, Any]:
    """Return how the latest start ended; one that left no word was killed."""
    ends = [event for event in read_journal(paths.journal_file) if event["kind"] == END]
    latest = [event for event in ends if event.get("start") == len(read_starts(paths))]
    # The process that failed tells why; the others only that they lost it.
    return latest[0] if latest else {"outcome": "killed"}


def _curves(paths: ExperimentPaths) -> dict[str, list[float | None]]:
    """Return the validation means of every register over the epochs, as JSON can hold them."""
    found = History(paths).epochs("val")
    return {name: [value if value == value else None for value in curve.values] for name, curve in found.items()}


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


def _free(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines of a log, or none if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return lines[-count:] if count else []
