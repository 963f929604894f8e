"""Show or follow the log of an experiment, or the output that torchrun kept of a rank."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from pipeline.command_lines import verb_line
from pipeline.errors import StateConflict, UsageError
from pipeline.lifecycle.mode import check_known
from pipeline.monitoring.experiment_state import LIVE, state_of
from pipeline.paths import ExperimentPaths, data_home
from pipeline.system.files import last_lines

EXAMPLE = "examples:\n  training-pipeline logs digits -f\n  training-pipeline logs digits --rank 1"
_SECONDS_BETWEEN_LOOKS = 0.3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", metavar="EXP")
    parser.add_argument("-f", "--follow", action="store_true", help="continue until no run is alive any more")
    parser.add_argument("--lines", type=int, default=20, metavar="N", help="how many of the last lines (default: 20)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, metavar="R", help="what this process printed, if torchrun kept it")
    which.add_argument(
        "--launcher", action="store_true", help="what torchrun itself printed, of a run in the background"
    )


def execute(arguments: argparse.Namespace) -> int:
    paths = ExperimentPaths(data_home(arguments.data_home), arguments.experiment)
    check_known(paths)
    files = [_FollowedFile(path) for path in _choose_files(paths, arguments)]
    for file in files:
        # On standard error, so that the log itself can be piped.
        print(f"==> {file.path}", file=sys.stderr, flush=True)
        file.show_last(arguments.lines)
    while arguments.follow:
        # Asked before the files are read: what a run writes before it ends is shown.
        is_alive = state_of(paths) in LIVE
        for file in files:
            file.show_new()
        if not is_alive:
            break
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return 0


def _choose_files(paths: ExperimentPaths, arguments: argparse.Namespace) -> list[Path]:
    """Return the log, or both streams of the latest attempt of torchrun that has the rank."""
    if arguments.rank is None:
        # A run in the background that failed before it opened its log has written to its launcher's log only.
        candidates = [paths.launcher_log] if arguments.launcher else [paths.log_file, paths.launcher_log]
        logs = [path for path in candidates if path.is_file()]
        if not logs:
            raise StateConflict(f"{paths.name!r} has no log at {candidates[0]} yet.\n  fix: run it first.")
        return logs[:1]
    attempts = paths.torchrun_logs.glob(f"*/attempt_*/{arguments.rank}")
    # By time: torchrun's names for its starts are random.
    latest = max(attempts, key=os.path.getmtime, default=None)
    if latest is None:
        ranks = sorted({path.name for path in paths.torchrun_logs.glob("*/attempt_*/*")})
        kept = f"there are ranks {', '.join(ranks)}" if ranks else "torchrun kept none"
        raise UsageError(
            f"No output of rank {arguments.rank} of {paths.name!r} was kept; {kept}.",
            f"{verb_line('run', paths.name, paths.home, '--', '--auto')}    (keeps the output of all ranks)",
        )
    return [path for path in (latest / "stdout.log", latest / "stderr.log") if path.exists()]


class _FollowedFile:
    """A file that others append to, replace or empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0
        self._inode = 0

    def show_last(self, count: int) -> None:
        status = self.path.stat()
        self._position = status.st_size
        self._inode = status.st_ino
        for line in last_lines(self.path, count):
            print(line, flush=True)

    def show_new(self) -> None:
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                # A reset replaces the log, and a shell may empty it: both are shown from their beginning.
                if status.st_ino != self._inode or status.st_size < self._position:
                    self._position = 0
                    self._inode = status.st_ino
                file.seek(self._position)
                text = file.read()
        except FileNotFoundError:
            return
        self._position += len(text)
        sys.stdout.write(text.decode(errors="replace"))
        sys.stdout.flush()
