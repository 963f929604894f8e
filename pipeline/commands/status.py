"""Show how far experiments have come, without changing their files."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter

from pipeline.command_lines import verb_line
from pipeline.lifecycle.mode import all_names, check_known
from pipeline.monitoring.experiment_state import (
    FINISHED,
    LIVE,
    NEW,
    RUNNING,
    STARTING,
    UNFINISHED,
    WAITING,
    Overview,
    RunOwner,
    name_state,
    read_overview,
)
from pipeline.monitoring.start_outcomes import FAILED, KILLED
from pipeline.monitoring.status_file import Status
from pipeline.paths import ExperimentPaths, data_home
from pipeline.system.files import last_lines
from pipeline.system.formatting import (
    clipped,
    shown_bytes,
    shown_duration,
    shown_parameters,
    shown_value,
    sparkline,
    table,
)
from pipeline.system.nvidia_smi import look_at_gpus

EXAMPLE = """\
examples:
  training-pipeline status
  training-pipeline status --failed
  training-pipeline status --sort digit_accuracy
  training-pipeline status digits --watch"""
EXIT_CODES = {FINISHED: 0, RUNNING: 4, STARTING: 4, WAITING: 4, UNFINISHED: 5, NEW: 6}
# Of a log, to find the last ones that begin with a time.
_NUM_LINES_TO_READ = 1000
_CLEAR_SCREEN = "\033[H\033[J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiments", nargs="*", metavar="EXP", help="default: all of them, one line each")
    parser.add_argument(
        "--watch", nargs="?", type=float, const=2.0, metavar="SECONDS", help="look again and again, until none is alive"
    )
    parser.add_argument(
        "--failed", action="store_true", help="list only experiments whose last start failed or was killed"
    )
    parser.add_argument(
        "--sort",
        metavar="KEY",
        help="order of the list: state, since, or a register, the best value first (default: name)",
    )
    parser.add_argument("--json", action="store_true", help="print what is known as JSON")
    codes = ", ".join(f"{code} {state}" for state, code in EXIT_CODES.items())
    parser.add_argument("--exit-code", action="store_true", help=f"show the state by the exit code: {codes}")
    parser.add_argument("--lines", type=int, default=3, metavar="N", help="last log lines to show (default: 3)")


def execute(arguments: argparse.Namespace) -> int:
    home = data_home(arguments.data_home)
    chosen = [ExperimentPaths(home, name) for name in arguments.experiments]
    for paths in chosen:
        check_known(paths)
    while True:
        # Without names every look lists the experiments again: others may have been added.
        shown = chosen or [ExperimentPaths(home, name) for name in all_names(home)]
        overviews = [read_overview(paths) for paths in shown]
        if arguments.failed:
            overviews = [overview for overview in overviews if _describe_state(overview) in (FAILED, KILLED)]
        if arguments.sort:
            overviews.sort(key=partial(_sort_key, arguments.sort))
        if arguments.json:
            found = {overview.experiment.paths.name: overview.to_json() for overview in overviews}
            text = json.dumps(found, indent=1)
        elif chosen:
            text = "\n".join(_format_pages(overviews, arguments.lines))
        elif overviews:
            text = "\n".join(_format_list(overviews))
        elif arguments.failed:
            text = f"no experiment in {home} has failed or was killed"
        else:
            text = f"no experiments in {home}\n  to make one: {verb_line('new', 'NAME', home)}"
        is_screen = arguments.watch is not None and sys.stdout.isatty()
        print(f"{_CLEAR_SCREEN if is_screen else ''}{text}", flush=True)
        states = {overview.state for overview in overviews}
        if arguments.watch is None or not states & set(LIVE):
            return max((EXIT_CODES[state] for state in states), default=0) if arguments.exit_code else 0
        time.sleep(arguments.watch)


def _format_place(overview: Overview) -> str:
    """Return where a live run is now, else where the results are."""
    experiment = overview.experiment
    progress = experiment.status.progress if overview.state == RUNNING else experiment.results.progress
    if progress is None:
        return ""
    # Short, because the values need the room: the state says whether it has finished, and only training has steps.
    return f"epoch {progress.epoch}" + (f", step {progress.step}" if progress.step else "")


def _describe_state(overview: Overview) -> str:
    """Return the state, and of an unfinished experiment how its last start ended."""
    return name_state(overview.state, overview.ended)


def _format_since(overview: Overview) -> str:
    """Return when the state was reached: when a live run began, else when the status file was written last."""
    if overview.owner is not None:
        return str(overview.owner.content.get("started", ""))
    return str(overview.experiment.status.updated or "")


def _shorten_since(overview: Overview) -> str:
    # Without seconds and time zone: the list has little room.
    return _format_since(overview)[5:16]


def _sort_key(key: str, overview: Overview) -> tuple[bool, float, str]:
    """Return what a list is ordered by; experiments without a value come last."""
    name = overview.experiment.paths.name
    if key == "state":
        return False, 0.0, f"{_describe_state(overview)} {name}"
    if key == "since":
        return not _format_since(overview), 0.0, f"{_format_since(overview)} {name}"
    best = overview.experiment.status.best
    value = best.values.get(key) if best else overview.experiment.status.last.get(key)
    if value is None:
        return True, 0.0, name
    is_max = overview.experiment.direction(key) == "max"
    return False, -value if is_max else value, name


def _format_time_left(overview: Overview) -> str:
    seconds = overview.experiment.status.eta_seconds
    return shown_duration(seconds) if overview.state == RUNNING and seconds is not None else ""


def _format_last_values(overview: Overview) -> str:
    last = overview.experiment.status.last
    return ", ".join(f"{register} {shown_value(value)}" for register, value in last.items())


# The columns of the list, from left to right. A new one is a new row here.
_COLUMNS: tuple[tuple[str, Callable[[Overview], str]], ...] = (
    ("experiment", attrgetter("experiment.paths.name")),
    ("state", _describe_state),
    ("since", _shorten_since),
    ("at", _format_place),
    ("left", _format_time_left),
    ("last values", _format_last_values),
)


def _format_list(overviews: list[Overview]) -> Iterator[str]:
    """Yield one line per experiment."""
    columns = []
    for title, format_cell in _COLUMNS:
        cells = [title, *map(format_cell, overviews)]
        if not any(cells[1:]):
            # The values need the room more than a title without anything below it.
            continue
        width = max(map(len, cells))
        columns.append([cell.ljust(width) for cell in cells])
    # A line that is too long is clipped and not folded, as a table would be: one line per experiment.
    for row in zip(*columns, strict=True):
        yield clipped("  ".join(row).rstrip())


def _format_pages(overviews: list[Overview], num_log_lines: int) -> Iterator[str]:
    """Yield a page for each experiment, then the GPUs of this machine."""
    for overview in overviews:
        log_file = overview.experiment.paths.log_file
        yield from map(clipped, _format_page(overview))
        # Tracebacks are left out: the line "ended" has what they come to.
        lines = [line for line in last_lines(log_file, _NUM_LINES_TO_READ) if line[:1].isdigit()]
        yield from (clipped(f"    {line}") for line in (lines[-num_log_lines:] if num_log_lines else ()))
        yield ""
    gpus, problem = look_at_gpus()
    for gpu in gpus:
        yield clipped(f"gpu {gpu}")
    if problem:
        yield clipped(problem)


def _format_page(overview: Overview) -> Iterator[str]:
    experiment = overview.experiment
    launch = overview.launch
    since = "" if overview.state in LIVE or not experiment.status.updated else f" since {experiment.status.updated}"
    yield f"{experiment.paths.name}: {_describe_state(overview)}{since}"
    if overview.owner is not None:
        yield from _format_live_run(overview.owner, experiment.status)
    if launch is not None and launch.job is not None:
        # Slurm's reason of a job that does not wait is the word None.
        waits_for = "" if launch.job_reason in ("", "None") else f" ({launch.job_reason})"
        yield f"  job        {launch.job} of Slurm: {launch.job_state}{waits_for}"
    if overview.state == WAITING and launch is not None and launch.after:
        yield f"  waiting    until {launch.after} has finished"
    if overview.ended is not None:
        # The process that failed first says why; the others only that they lost it.
        error = overview.ended.errors[0].error.strip().splitlines() if overview.ended.errors else []
        # A traceback ends with what happened; a message of ours begins with it, and ends with what can be done.
        last = error[-1:] if error[:1] and error[0].startswith('File "') else error[:1]
        reason = last[0] if last else overview.ended.reason
        yield f"  ended      {overview.ended.outcome}{f': {reason}' if reason else ''}"
    if experiment.results.progress is not None:
        yield f"  committed  {experiment.results.progress} (start {len(experiment.starts)})"
    if parameters := experiment.parameters():
        yield f"  parameters {shown_parameters(parameters)}"
    yield from _format_values(overview)
    yield f"  disk       {shown_bytes(overview.used_bytes)} used, {shown_bytes(overview.free_bytes)} free"
    if experiment.status.updated:
        yield f"  updated    {experiment.status.updated}"
    yield f"  log        {experiment.paths.log_file}"


def _format_live_run(owner: RunOwner, status: Status) -> Iterator[str]:
    process = owner.content
    age = owner.seconds_since_heartbeat
    job = f", job {process['job']}" if process.get("job") else ""
    yield f"  running    pid {process.get('pid')} on {process.get('host')}{job} since {process.get('started')}"
    yield f"  alive      {'no heartbeat yet' if age is None else f'last heartbeat {age:.0f} s ago'}"
    if status.progress is None:
        yield "  now        starting"
        return
    total = "" if status.num_steps is None else f" of {status.num_steps}"
    rate = f", {1 / status.step_seconds:.3g} steps/s" if status.step_seconds else ""
    yield f"  now        {status.progress}{total}{rate}"
    if status.epoch_eta_seconds is not None:
        # Without a last epoch, the time left is that of the epoch alone.
        has_end = status.max_epochs and status.eta_seconds is not None
        whole = f", {shown_duration(status.eta_seconds or 0)} of the experiment" if has_end else ""
        yield f"  left       {shown_duration(status.epoch_eta_seconds)} of the epoch{whole}"


def _format_values(overview: Overview) -> Iterator[str]:
    """Yield one row per register: the latest value, its course, and the value of the best epoch."""
    status = overview.experiment.status
    best = status.best
    rows = [("", "last", "", f"best (epoch {best.epoch})" if best else "")]
    for register, value in status.last.items():
        means = overview.validation.get(register, [])
        course = sparkline([float("nan") if mean is None else mean for mean in means])
        best_value = shown_value(best.values.get(register)) if best else ""
        rows.append((f"  {register}", shown_value(value), course, best_value))
    if len(rows) > 1:
        yield from table(rows)
