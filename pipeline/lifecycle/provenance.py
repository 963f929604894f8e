"""Provenance: what this start of an experiment runs on, and whether torchrun made it by a restart.

Apart from ``starts.py``, which reads the list of all starts, because gathering over the ranks needs torch.
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from typing import cast

import torch

import pipeline
from pipeline.command_lines import LAUNCH_VARIABLE
from pipeline.distributed.hardware import describe_hardware
from pipeline.distributed.processes import Processes
from pipeline.lifecycle.starts import Start, read_starts
from pipeline.paths import ExperimentPaths
from pipeline.progress import Progress
from pipeline.system.launcher_watchdog import launcher_mark

_MAX_SECONDS_FOR_GIT = 10


def describe_start(processes: Processes, progress: Progress, overrides: Sequence[str] = ()) -> Start:
    """Return the record of this start; called on every rank, because it gathers over all of them."""
    ranks = [asdict(hardware) for hardware in processes.gather(describe_hardware(processes.device))]
    by_rank = {name: [rank[name] for rank in ranks] for name in ranks[0]}
    commit = _run_git("rev-parse", "HEAD")
    start = {
        "id": uuid.uuid4().hex,
        "command": sys.argv,
        "launch": os.environ.get(LAUNCH_VARIABLE),
        "overrides": list(overrides),
        "time": time.strftime("%Y-%m-%d %H:%M:%S%z"),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "from": progress.as_json(),
        "world_size": processes.world_size,
        "backend": processes.backend,
        "devices": by_rank.pop("device"),
        "cpus": by_rank.pop("cpu"),
        "cpu_capabilities": by_rank.pop("cpu_capability"),
        # Nearly always the same on every rank, and then written once.
        **{name: values if len(set(values)) > 1 else values[0] for name, values in by_rank.items()},
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "launchers": processes.gather(launcher_mark()),
        "pipeline": pipeline.__version__,
        "python": platform.python_version(),
        # Of the working directory, where the author's code usually is; None outside a checkout.
        "git_commit": commit,
        "git_dirty": bool(_run_git("status", "--porcelain")) if commit else None,
    }
    # The keys of by_rank come from the fields of Hardware, which a type checker cannot follow.
    return cast(Start, start)


def _run_git(*words: str) -> str | None:
    """Return what git prints; None without git, outside a checkout, or if it takes too long."""
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=_MAX_SECONDS_FOR_GIT, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def was_started_before(paths: ExperimentPaths, processes: Processes) -> bool:
    """Return whether torchrun has restarted these processes: after a failure or a change of machines."""
    # torchrun counts failures, though not on all machines alike, and does not count machines that come and go. So each
    # start records its torchruns, and a torchrun that made the latest start as well means a restart.
    launchers = {launcher for launcher in processes.gather(launcher_mark()) if launcher}
    has_failed = processes.any(processes.was_restarted)

    def has_known_launcher() -> bool:
        starts = read_starts(paths)
        recorded = starts[-1].get("launchers") if starts else None
        # The file may have been damaged or edited, and starts of older versions have no such key.
        return isinstance(recorded, list) and any(mark in launchers for mark in recorded if isinstance(mark, str))

    # A failure that any rank knows of decides without a look at the disk.
    return has_failed or processes.on_rank_zero(has_known_launcher)
