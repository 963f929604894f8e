"""Slurm, as far as this program talks to it: submitting, and asking how a job stands."""

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
_JOB = re.compile(r"\d+(_\d+)?")
_SECONDS_TO_ANSWER = 5.0
# A controller serves a whole cluster: a repeated look must not ask each time.
_SECONDS_AN_ANSWER_HOLDS = 4


@dataclass(frozen=True)
class JobState:
    """What Slurm says of a job that is waiting or running."""

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
    return done.stdout.strip().partition(";")[0]


def own_jobs() -> set[str]:
    """Return the names of the job that this process is part of: its number, and its place in an array."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    return {os.environ.get("SLURM_JOB_ID", ""), f"{array}_{task}"}


def standing(job: object) -> JobState | None:
    """Return how a job stands; None if it is over, or if Slurm cannot be asked."""
    if not isinstance(job, str) or not _JOB.fullmatch(job):
        return None
    return _asked(job, int(time.monotonic() // _SECONDS_AN_ANSWER_HOLDS))


@lru_cache(maxsize=256)
def _asked(job: str, moment: int) -> JobState | None:
    question = ["squeue", "--noheader", f"--jobs={job}", "--format=%T %r"]
    try:
        done = subprocess.run(question, capture_output=True, text=True, timeout=_SECONDS_TO_ANSWER, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    state, _, reason = done.stdout.strip().partition(" ")
    return JobState(state, reason) if done.returncode == 0 and state else None
