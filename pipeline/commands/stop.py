"""Ask a run to finish its step or epoch, commit and end."""

from __future__ import annotations

import argparse
import contextlib
import time

from pipeline.arguments import command_line
from pipeline.errors import StateConflict
from pipeline.lifecycle.mode import check_known
from pipeline.monitoring.experiment_state import RUNNING, STARTING, WAITING, state_of
from pipeline.monitoring.launch_record import launch_facts
from pipeline.paths import ExperimentPaths, data_home
from pipeline.store.lock import find_stop_file
from pipeline.system.files import replace_text

EXAMPLE = "example:\n  python -m pipeline stop digits --after epoch --wait"
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
        if arguments.wait:
            _wait_for_start(paths)
        _check_running(paths)
    for paths in everything:
        _ask(paths, arguments.after)
        print(f"{paths.name}: asked to stop after the current {arguments.after}; it will be resumable")
    while arguments.wait and any(state_of(paths) == RUNNING for paths in everything):
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    for paths in everything if arguments.wait else ():
        print(f"{paths.name}: {state_of(paths)}")
        print(f"  to continue: {command_line(paths.name, paths.home, '--auto')}")
    return 0


def _wait_for_start(paths: ExperimentPaths) -> None:
    while state_of(paths) == STARTING:
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _ask(paths: ExperimentPaths, after: str) -> None:
    """Leave a request where no other run will find it; one that has only just taken the lock is waited for."""
    while True:
        stop_file = find_stop_file(paths)
        # Between the two looks the run may have ended, and its claim with it.
        with contextlib.suppress(FileNotFoundError):
            if stop_file is not None:
                # Whole at once: the run may look at any moment.
                replace_text(stop_file, f"{after}\n")
                return
        _check_running(paths)
        time.sleep(_SECONDS_FOR_A_CLAIM)


def _check_running(paths: ExperimentPaths) -> None:
    state = state_of(paths)
    if state in (STARTING, WAITING):
        launch = launch_facts(paths)
        end = f"scancel {launch['job']}" if "job" in launch else f"kill -- -{launch.get('pid')}"
        raise StateConflict(
            f"{paths.name!r} is {state} and has nothing to commit.\n"
            f"  fix: wait for it, or end what was launched with: {end}"
        )
    if state != RUNNING:
        raise StateConflict(f"No run of {paths.name!r} is alive: it is {state}.")
