"""The launch record: which background process or Slurm job was started for an experiment, before its run exists."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass

from pipeline.lifecycle.starts import Start, read_starts
from pipeline.monitoring.json_values import as_int, as_text
from pipeline.paths import ExperimentPaths
from pipeline.store.lock import read_json
from pipeline.system.files import replace_text
from pipeline.system.launcher_watchdog import process_mark
from pipeline.system.slurm_client import own_jobs, standing


def record_launch(paths: ExperimentPaths, pid: int, after: str | None = None) -> None:
    """Record a background process, and the experiment that it trains before this one."""
    # Process numbers are reused; the mark distinguishes the processes that had this one.
    _record(paths, {"pid": pid, "mark": process_mark(pid)}, after)


def record_job(paths: ExperimentPaths, job: str, after: str | None = None) -> None:
    """Record the Slurm job that will run an experiment."""
    _record(paths, {"job": job}, after)


def _record(paths: ExperimentPaths, launched: dict[str, object], after: str | None) -> None:
    starts = read_starts(paths)
    content = {
        **launched,
        "after": after,
        "last_start": starts[-1] if starts else None,
        "host": socket.gethostname(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S%z"),
    }
    replace_text(paths.launch_file, json.dumps(content) + "\n")


@dataclass(frozen=True)
class Launch:
    """A launch that is not over; ``content`` is the record, with the answer of Slurm for a job."""

    pid: int | None
    job: str | None
    job_state: str
    job_reason: str
    after: str | None
    content: dict[str, object]

    def has_opened(self, last_start: Start | None) -> bool:
        """Return whether the launched process has recorded a start, given the last one that is recorded now."""
        return last_start is not None and last_start != self.content.get("last_start")


def read_launch(paths: ExperimentPaths) -> Launch | None:
    """Return the launch whose process still runs on this host or whose job is not over, if there is one."""
    content = read_json(paths.launch_file)
    job = as_text(content.get("job"))
    after = as_text(content.get("after"))
    if "job" in content:
        # A job that asks about its own experiment wants to know how its run has ended.
        answer = None if job in own_jobs() else standing(job)
        if answer is None:
            return None
        content |= {"job_state": answer.state, "job_reason": answer.reason}
        return Launch(None, job, answer.state, answer.reason, after, content)
    # Process numbers of another host mean nothing here.
    is_here = content.get("host") == socket.gethostname() and content.get("mark") is not None
    if not is_here or process_mark(content.get("pid")) != content["mark"]:
        return None
    return Launch(as_int(content.get("pid")), None, "", "", after, content)
