"""Ask a run to finish its step or epoch, commit and end."""

from __future__ import annotations

import argparse
import contextlib
import time

from pipeline.command_lines import run_line
from pipeline.errors import StateConflict
from pipeline.lifecycle.mode import check_known
from pipeline.lifecycle.starts import last_num_processes
from pipeline.monitoring.experiment_state import RUNNING, STARTING, read_liveness, state_of
from pipeline.paths import ExperimentPaths, data_home
from pipeline.store.lock import find_stop_file
from pipeline.system.files import replace_text

EXAMPLE = "example:\n  training-pipeline stop digits --after epoch --wait"
_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_FOR_A_CLAIM = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiments", nargs="+", metavar="EXP")
    parser.add_argument(
        "--after", choices=("step", "epoch"), default="step", help="what to finish first (default: step)"
    )
    parser.add_argument(
        "--wait", action="store_true", help="return when the run has ended; one that is starting is waited for first"
    )


def execute(arguments: argparse.Namespace) -> int:
    everything = [ExperimentPaths(data_home(arguments.data_home), name) for name in arguments.experiments]
    for paths in everything:
        check_known(paths)
        while arguments.wait and state_of(paths) == STARTING:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        _check_running(paths)
    # Only when all of them can be stopped is one of them asked.
    for paths in everything:
        _request_stop(paths, arguments.after)
        print(f"{paths.name}: asked to stop after the current {arguments.after}; it will be resumable")
    while arguments.wait and any(state_of(paths) == RUNNING for paths in everything):
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    for paths in everything if arguments.wait else ():
        print(f"{paths.name}: {state_of(paths)}")
        print(f"  to continue: {run_line(paths.name, paths.home, '--auto', num_processes=last_num_processes(paths))}")
    return 0


def _request_stop(paths: ExperimentPaths, after: str) -> None:
    """Write the request into the claim of the live run, where no other run will find it."""
    while True:
        # A run that has only just taken the lock has no claim yet: there is nowhere to put a request, so wait for it.
        stop_file = find_stop_file(paths)
        # The run may end before the request is written, and its claim with it.
        with contextlib.suppress(FileNotFoundError):
            if stop_file is not None:
                # Written as a whole: the run may read it at any moment.
                replace_text(stop_file, f"{after}\n")
                return
        _check_running(paths)
        time.sleep(_SECONDS_FOR_A_CLAIM)


def _check_running(paths: ExperimentPaths) -> None:
    liveness = read_liveness(paths)
    launch = liveness.launch
    if launch is not None:
        # A launch is a session of its own, so its process group has all that it started.
        command = f"scancel {launch.job}" if launch.job else f"kill -- -{launch.pid}"
        raise StateConflict(
            f"{paths.name!r} is {liveness.state} and has nothing to commit.\n"
            f"  fix: wait for it, or end what was launched with: {command}"
        )
    if liveness.state != RUNNING:
        raise StateConflict(f"No run of {paths.name!r} is alive: it is {liveness.state}.")
