"""Client of Slurm: submits batch scripts and asks for the state of jobs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pipeline.errors import PipelineError, UsageError

PENDING = "PENDING"
# The number of a job, and of a task in a job array.
_JOB = re.compile(r"\d+(_\d+)?")
_MAX_SECONDS_TO_ANSWER = 5.0
# One controller serves the whole cluster, so a verb that looks repeatedly must not query it every time.
_SECONDS_BETWEEN_QUERIES = 4


@dataclass(frozen=True)
class JobState:
    """State of a job that is waiting or running, and Slurm's reason for it."""

    state: str
    reason: str


def check_can_submit() -> None:
    if shutil.which("sbatch") is None:
        raise UsageError(
            "--submit needs Slurm's sbatch, but this machine has none.",
            "call it on a login node of the cluster, or without --submit for the script alone",
        )


def submit(script: Path, *options: str) -> str:
    """Submit a batch script and return the number of its job."""
    line = ["sbatch", "--parsable", *options, str(script)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PipelineError(f"sbatch refused {script}:\n  {done.stderr.strip()}")
    # Where there are several clusters, --parsable adds the name of one after a semicolon.
    return done.stdout.strip().partition(";")[0]


def own_jobs() -> set[str]:
    """Return the names of the job that this process runs in: its number, and its array number with the task."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    return {os.environ.get("SLURM_JOB_ID", ""), f"{array}_{task}"}


def standing(job: object) -> JobState | None:
    """Return the state of a job; None if it is over, or if Slurm does not answer."""
    # ``job`` was read from a file that anyone may have edited, and becomes part of a command line.
    if not isinstance(job, str) or not _JOB.fullmatch(job):
        return None
    return _query_job(job, int(time.monotonic() // _SECONDS_BETWEEN_QUERIES))


@lru_cache(maxsize=256)
def _query_job(job: str, period: int) -> JobState | None:
    # ``period`` is only a key of the cache: within one period an answer is reused.
    command = ["squeue", "--noheader", f"--jobs={job}", "--format=%T %r"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_MAX_SECONDS_TO_ANSWER, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    # squeue fails, or prints nothing, for a job that has left the queue.
    state, _, reason = done.stdout.strip().partition(" ")
    return JobState(state, reason) if done.returncode == 0 and state else None
