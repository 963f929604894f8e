"""Distinguishes a restart by torchrun (same torchrun, new processes) from a start by a person."""

from __future__ import annotations

from pipeline.distributed.processes import Processes
from pipeline.lifecycle.starts import read_starts
from pipeline.paths import ExperimentPaths
from pipeline.system.launcher_watchdog import launcher_mark


def was_started_before(paths: ExperimentPaths, processes: Processes) -> bool:
    """Tell whether torchrun has started these processes again: after a failure, or as a machine came or went.

    Of failures torchrun tells its processes, and not all machines need agree; of machines that come and go it tells
    nothing. So each start writes down its torchruns, and one that is there again goes on.
    """
    launchers = {launcher for launcher in processes.gather(launcher_mark()) if launcher}
    has_failed = processes.any(processes.was_restarted)
    return has_failed or processes.on_rank_zero(lambda: not launchers.isdisjoint(_latest_launchers(paths)))


def _latest_launchers(paths: ExperimentPaths) -> list[object]:
    starts = read_starts(paths)
    known = starts[-1].get("launchers") if starts else None
    return [one for one in known if isinstance(one, str)] if isinstance(known, list) else []
