"""Launches: which process was started, or job submitted, for an experiment, so that others can see it coming."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from pipeline.lifecycle.starts import read_starts
from pipeline.paths import ExperimentPaths
from pipeline.store.lock import read_json
from pipeline.system.files import replace_text
from pipeline.system.launcher_watchdog import process_mark
from pipeline.system.slurm_client import own_jobs, standing


def record_launch(paths: ExperimentPaths, pid: int, after: str | None = None) -> None:
    """Write down who was started, atomically, and after which other experiment this one comes."""
    _record(paths, {"pid": pid, "mark": process_mark(pid)}, after)


def record_job(paths: ExperimentPaths, job: str, after: str | None = None) -> None:
    """Write down which job of a scheduler will run an experiment."""
    _record(paths, {"job": job}, after)


def _record(paths: ExperimentPaths, who: dict[str, Any], after: str | None) -> None:
    facts = {
        **who,
        "after": after,
        "last_start": _last_start(paths),
        "host": socket.gethostname(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S%z"),
    }
    replace_text(paths.launch_file, json.dumps(facts) + "\n")


def has_opened(paths: ExperimentPaths, launch: dict[str, Any]) -> bool:
    """Return whether the launched process has recorded a start."""
    return _last_start(paths) not in (None, launch.get("last_start"))


def _last_start(paths: ExperimentPaths) -> dict[str, Any] | None:
    starts = read_starts(paths)
    return starts[-1] if starts else None


def launch_facts(paths: ExperimentPaths) -> dict[str, Any]:
    """Return what was written down of a launch that still runs here, or of a job that is not over, or nothing."""
    facts = read_json(paths.launch_file)
    if "job" in facts:
        # A job that asks about its own experiment wants to know how its run has ended.
        found = None if facts["job"] in own_jobs() else standing(facts["job"])
        return {**facts, "job_state": found.state, "job_reason": found.reason} if found else {}
    is_here = facts.get("host") == socket.gethostname() and facts.get("mark") is not None
    return facts if is_here and process_mark(facts.get("pid")) == facts["mark"] else {}
