"""Provenance: what each start of an experiment ran on."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import asdict
from typing import Any

import torch

import pipeline
from pipeline.distributed.hardware import describe_hardware
from pipeline.distributed.processes import Processes
from pipeline.progress import Progress
from pipeline.system.launcher_watchdog import launcher_mark


def describe_start(processes: Processes, progress: Progress) -> dict[str, Any]:
    """Return everything worth knowing of this start; the same call on every rank."""
    ranks = [asdict(hardware) for hardware in processes.gather(describe_hardware(processes.device))]
    by_rank = {name: [rank[name] for rank in ranks] for name in ranks[0]}
    return {
        "id": uuid.uuid4().hex,
        "command": sys.argv,
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
        **_git(),
    }


def _git() -> dict[str, Any]:
    """Return commit and dirty flag of the working directory, or nothing outside a checkout."""
    commit = _output("git", "rev-parse", "HEAD")
    return {"git_commit": commit, "git_dirty": bool(_output("git", "status", "--porcelain")) if commit else None}


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
