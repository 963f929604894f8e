"""Distinguishes a restart by torchrun (same torchrun, new processes) from a start by a person."""

from __future__ import annotations

from pipeline.distributed.processes import Processes
from pipeline.lifecycle.starts import read_starts
from pipeline.paths import ExperimentPaths
from pipeline.system.launcher_watchdog import launcher_mark


def was_started_before(paths: ExperimentPaths, processes: Processes) -> bool:
    """Return whether torchrun has started these processes again: after a failure, or as a machine came or went.

    torchrun reports failures to its processes, though not on all machines alike; machines that come and go it does
    not report. So each start records its torchruns, and a torchrun that is there again continues.
    """
    launchers = {launcher for launcher in processes.gather(launcher_mark()) if launcher}
    has_failed = processes.any(processes.was_restarted)
    return has_failed or processes.on_rank_zero(lambda: not launchers.isdisjoint(_latest_launchers(paths)))


def _latest_launchers(paths: ExperimentPaths) -> list[object]:
    starts = read_starts(paths)
    known = starts[-1].get("launchers") if starts else None
    return [one for one in known if isinstance(one, str)] if isinstance(known, list) else []
