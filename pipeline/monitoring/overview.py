"""All that can be known of an experiment from outside, without touching it and without torch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from pipeline.errors import UnreadableFile
from pipeline.lifecycle.mode import inspect_results
from pipeline.lifecycle.starts import read_starts
from pipeline.monitoring.curves import History
from pipeline.monitoring.experiment_state import LIVE, RUNNING, UNFINISHED, state_of
from pipeline.monitoring.launch_record import launch_facts
from pipeline.monitoring.start_outcomes import outcomes
from pipeline.monitoring.status_file import read_status
from pipeline.paths import ExperimentPaths
from pipeline.store.lock import read_owner, seconds_since_beat
from pipeline.system.files import num_bytes
from pipeline.system.formatting import as_json


def describe(paths: ExperimentPaths) -> dict[str, Any]:
    """Return what is known of one experiment: from the committed state, with details of the status file."""
    situation = inspect_results(paths)
    state = state_of(paths)
    status = read_status(paths.status_file) if situation.exists else {}
    is_running = state == RUNNING
    return {
        **status,
        "state": state,
        "committed": situation.progress.as_json() if situation.progress else None,
        "owner": read_owner(paths) if is_running else None,
        "launch": launch_facts(paths) if state in LIVE else None,
        "seconds_since_sign_of_life": seconds_since_beat(paths) if is_running else None,
        "num_starts": len(read_starts(paths)) if situation.exists else 0,
        "ended": _ended(outcomes(paths)) if state == UNFINISHED else None,
        "history": _curves(paths) if situation.exists else {},
        "disk": {"used": num_bytes(paths.results), "free": _free(paths.results)},
    }


def _ended(starts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return how the latest start ended: outcome, reason, and what went wrong on which rank."""
    return {key: starts[-1][key] for key in ("outcome", "reason", "errors")} if starts else None


def _curves(paths: ExperimentPaths) -> dict[str, list[float | None]]:
    """Return the validation means of every register over the epochs as JSON can hold them; none if damaged."""
    try:
        found = History(paths).epochs("val")
    except (OSError, UnreadableFile):
        return {}
    return {name: as_json(curve.values) for name, curve in found.items()}


def _free(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
