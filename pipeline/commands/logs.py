"""Show or follow the log of an experiment."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from pipeline.arguments import verb_line
from pipeline.errors import StateConflict, UsageError
from pipeline.lifecycle.mode import check_known
from pipeline.monitoring.experiment_state import LIVE, state_of
from pipeline.paths import ExperimentPaths, data_home
from pipeline.system.files import last_lines

EXAMPLE = "examples:\n  python -m pipeline logs digits -f\n  python -m pipeline logs digits --rank 1"
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
    followed = [_Followed(path) for path in _files(paths, arguments)]
    for file in followed:
        print(f"==> {file.path}", file=sys.stderr, flush=True)
        file.show_last(arguments.lines)
    while arguments.follow:
        is_alive = state_of(paths) in LIVE
        for file in followed:
            file.show_new()
        if not is_alive:
            break
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return 0


def _files(paths: ExperimentPaths, arguments: argparse.Namespace) -> list[Path]:
    if arguments.rank is not None:
        return _rank_files(paths, arguments.rank)
    # A run in the background that failed before it opened its log has written to its launcher's log only.
    chosen = [paths.launcher_log] if arguments.launcher else [paths.log_file, paths.launcher_log]
    found = [path for path in chosen if path.is_file()]
    if not found:
        raise StateConflict(f"{paths.name!r} has no log at {chosen[0]} yet.\n  fix: run it first.")
    return found[:1]


def _rank_files(paths: ExperimentPaths, rank: int) -> list[Path]:
    """Return both streams of the latest attempt that has such a process."""
    attempts = sorted(paths.torchrun_logs.glob(f"*/attempt_*/{rank}"), key=lambda path: path.stat().st_mtime)
    if not attempts:
        ranks = sorted({path.name for path in paths.torchrun_logs.glob("*/attempt_*/*")})
        kept = f"there are ranks {', '.join(ranks)}" if ranks else "torchrun kept none"
        raise UsageError(
            f"No output of rank {rank} of {paths.name!r} was kept; {kept}.",
            f"start it with: {verb_line('run', paths.name, paths.home)}",
        )
    return [
        attempts[-1] / f"{stream}.log" for stream in ("stdout", "stderr") if (attempts[-1] / f"{stream}.log").exists()
    ]


class _Followed:
    """A file that others append to, replace or empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._place = 0
        self._inode = 0

    def show_last(self, count: int) -> None:
        status = self.path.stat()
        self._place = status.st_size
        self._inode = status.st_ino
        for line in last_lines(self.path, count):
            print(line, flush=True)

    def show_new(self) -> None:
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._place:
                    self._place = 0
                    self._inode = status.st_ino
                file.seek(self._place)
                text = file.read()
        except FileNotFoundError:
            return
        self._place += len(text)
        sys.stdout.write(text.decode(errors="replace"))
        sys.stdout.flush()
