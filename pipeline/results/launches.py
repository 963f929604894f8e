"""Launches: which process was started in the background for an experiment, so that others can see it coming."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from pipeline.paths import ExperimentPaths
from pipeline.results.lock import process_mark, read_json
from pipeline.results.starts import read_starts
from pipeline.runtime.regular_files import replace_text


def record_launch(paths: ExperimentPaths, pid: int, after: str | None = None) -> None:
    """Write down who was started, atomically, and after which other experiment this one comes."""
    facts = {
        "pid": pid,
        "mark": process_mark(pid),
        "after": after,
        "last_start": _last_start(paths),
        "host": socket.gethostname(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S%z"),
    }
    replace_text(paths.launch_file, json.dumps(facts) + "\n")


def has_opened(paths: ExperimentPaths, launch: dict[str, Any]) -> bool:
    """Tell whether a launch has come to its run, so that its process has no more to do than to leave."""
    return _last_start(paths) not in (None, launch.get("last_start"))


def _last_start(paths: ExperimentPaths) -> dict[str, Any] | None:
    starts = read_starts(paths)
    return starts[-1] if starts else None


def launch_facts(paths: ExperimentPaths) -> dict[str, Any]:
    """Return what was written down of a launch on this machine that still runs, or nothing."""
    facts = read_json(paths.launch_file)
    is_here = facts.get("host") == socket.gethostname() and facts.get("mark") is not None
    return facts if is_here and process_mark(facts.get("pid")) == facts["mark"] else {}
