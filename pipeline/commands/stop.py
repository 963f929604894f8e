"""Ask a run to finish its step or epoch, commit and end."""

from __future__ import annotations

import argparse
import contextlib
import socket
import time

from pipeline.command_lines import verb_line
from pipeline.errors import StateConflict
from pipeline.lifecycle.mode import check_known
from pipeline.lifecycle.starts import line_like_last_start
from pipeline.monitoring.experiment_state import (
    RUNNING,
    STARTING,
    describe_state,
    read_experiment_state,
    read_liveness,
    state_of,
)
from pipeline.monitoring.json_values import as_int
from pipeline.paths import ExperimentPaths, data_home
from pipeline.store.lock import find_stop_file
from pipeline.system.files import replace_text
from pipeline.system.launcher_watchdog import kill_run

EXAMPLE = "example:\n  training-pipeline stop digits --after epoch --wait"
_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_FOR_A_CLAIM = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiments", nargs="+", metavar="EXP")
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--now", action="store_true", help="kill the run on this machine; its last commit counts")
    when.add_argument("--after", choices=("step", "epoch"), default="step", help="what to finish first (default: step)")
    parser.add_argument(
        "--wait", action="store_true", help="return when the run has ended; one that is starting is waited for first"
    )


def execute(arguments: argparse.Namespace) -> int:
    if arguments.now:
        return _kill_all([ExperimentPaths(data_home(arguments.data_home), name) for name in arguments.experiments])
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
        print(f"{paths.name}: {describe_state(read_experiment_state(paths))}")
        print(f"  to continue: {line_like_last_start(paths, '--auto')}")
    return 0


def _kill_all(everything: list[ExperimentPaths]) -> int:
    """Kill runs of this machine; only when all of them can be killed is one of them."""
    owners = []
    for paths in everything:
        check_known(paths)
        owner = read_liveness(paths).owner
        if owner is None:
            _check_running(paths)
        elif owner.content.get("host") != socket.gethostname():
            raise StateConflict(
                f"The run of {paths.name!r} is on host {owner.content.get('host')}, and can be killed only there.\n"
                f"  fix: {verb_line('stop', paths.name, paths.home)}    (asks it to stop, from anywhere)"
            )
        else:
            owners.append((paths, owner))
    for paths, owner in owners:
        pid = as_int(owner.content.get("pid"))
        if pid is not None:
            kill_run(pid)
        while read_liveness(paths).state == RUNNING:
            time.sleep(_SECONDS_FOR_A_CLAIM)
        print(f"{paths.name}: killed; the last commit counts")
        print(f"  to continue: {line_like_last_start(paths, '--auto')}")
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
