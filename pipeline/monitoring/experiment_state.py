"""The state of an experiment as a whole, read from outside without touching it."""

from __future__ import annotations

from pipeline.lifecycle.mode import inspect_results
from pipeline.monitoring.launch_record import has_opened, launch_facts
from pipeline.paths import ExperimentPaths
from pipeline.store.lock import shows_life
from pipeline.system.slurm_client import PENDING

FINISHED = "finished"
RUNNING = "running"
STARTING = "starting"
WAITING = "waiting"
UNFINISHED = "unfinished"
NEW = "new"
LIVE = (RUNNING, STARTING, WAITING)


def state_of(paths: ExperimentPaths) -> str:
    """Return one of finished, running, starting, waiting, unfinished, new."""
    situation = inspect_results(paths)
    if situation.is_finished:
        return FINISHED
    if shows_life(paths):
        return RUNNING
    launch = launch_facts(paths)
    if "job" in launch:
        return WAITING if launch["job_state"] == PENDING else STARTING
    if launch and not has_opened(paths, launch):
        return WAITING if launch.get("after") and not _is_finished(paths, launch["after"]) else STARTING
    return UNFINISHED if situation.exists else NEW


def _is_finished(paths: ExperimentPaths, name: str) -> bool:
    return inspect_results(paths.other(name)).is_finished
