"""Show how far experiments have come, without touching them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.arguments import verb_line
from pipeline.lifecycle.mode import all_names, check_known
from pipeline.monitoring.experiment_state import FINISHED, LIVE, NEW, RUNNING, STARTING, UNFINISHED, WAITING
from pipeline.monitoring.overview import describe
from pipeline.paths import ExperimentPaths, data_home
from pipeline.progress import Progress
from pipeline.system.files import last_lines
from pipeline.system.formatting import clipped, shown_bytes, shown_duration, shown_value, sparkline, table
from pipeline.system.nvidia_smi import look_at_gpus

EXAMPLE = "examples:\n  python -m pipeline status\n  python -m pipeline status digits --watch"
EXIT_CODES = {FINISHED: 0, RUNNING: 4, STARTING: 4, WAITING: 4, UNFINISHED: 5, NEW: 6}
_CLEAR = "\033[H\033[J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiments", nargs="*", metavar="EXP", help="default: all of them, one line each")
    parser.add_argument(
        "--watch", nargs="?", type=float, const=2.0, metavar="SECONDS", help="look again and again, until none is alive"
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
        everything = chosen or [ExperimentPaths(home, name) for name in all_names(home)]
        found = {paths.name: describe(paths) for paths in everything}
        text = json.dumps(found, indent=1) if arguments.json else "\n".join(_lines(everything, found, arguments))
        is_screen = arguments.watch is not None and sys.stdout.isatty()
        print(f"{_CLEAR if is_screen else ''}{text}", flush=True)
        states = [status["state"] for status in found.values()]
        if arguments.watch is None or not set(states) & set(LIVE):
            return max((EXIT_CODES[state] for state in states), default=0) if arguments.exit_code else 0
        time.sleep(arguments.watch)


def _lines(everything: list[ExperimentPaths], found: dict[str, Any], arguments: argparse.Namespace) -> Iterator[str]:
    if not arguments.experiments:
        yield from _overview(found, data_home(arguments.data_home))
        return
    for paths in everything:
        for line in _block(paths, found[paths.name]):
            yield clipped(line)
        yield from (clipped(f"    {line}") for line in last_lines(paths.log_file, arguments.lines))
        yield ""
    yield from map(clipped, _gpu_lines())


def _overview(found: dict[str, Any], home: Path) -> Iterator[str]:
    if not found:
        yield f"no experiments; {verb_line('new', 'NAME', home)} writes one"
        return
    rows = [("experiment", "state", "at", "left", "last values")]
    for name, status in found.items():
        left = shown_duration(status["eta"]) if status["state"] == RUNNING and "eta" in status else ""
        values = ", ".join(f"{one} {shown_value(value)}" for one, value in status.get("last", {}).items())
        rows.append((name, status["state"], _place(status), left, values))
    # The last column is clipped rather than folded: one line per experiment.
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        aligned = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        yield clipped("  ".join([*aligned, row[4]]).rstrip())


def _place(status: dict[str, Any]) -> str:
    known = status.get("progress") if status["state"] == RUNNING else status["committed"]
    return str(Progress.from_json(known)) if known else ""


def _block(paths: ExperimentPaths, status: dict[str, Any]) -> Iterator[str]:
    yield f"{paths.name}: {status['state']}"
    if status["state"] == RUNNING:
        yield from _live_lines(status)
    launch = status["launch"] or {}
    if "job" in launch:
        yield f"  job        {launch['job']} of Slurm: {launch['job_state']}{_reason(launch)}"
    if status["state"] == WAITING and launch.get("after"):
        yield f"  waiting    until {launch['after']} has finished"
    if status["ended"]:
        yield f"  ended      {_end(status['ended'])}"
    if status["committed"]:
        yield f"  committed  {Progress.from_json(status['committed'])} (start {status['num_starts']})"
    yield from _value_lines(status)
    yield f"  disk       {shown_bytes(status['disk']['used'])} used, {shown_bytes(status['disk']['free'])} free"
    if status.get("updated"):
        yield f"  updated    {status['updated']}"
    yield f"  log        {paths.log_file}"


def _reason(launch: dict[str, Any]) -> str:
    return "" if launch["job_reason"] in ("", "None") else f" ({launch['job_reason']})"


def _live_lines(status: dict[str, Any]) -> Iterator[str]:
    owner = status["owner"]
    age = status["seconds_since_sign_of_life"]
    job = f", job {owner['job']}" if owner.get("job") else ""
    yield f"  running    pid {owner.get('pid')} on {owner.get('host')}{job} since {owner.get('started')}"
    yield f"  alive      {'no heartbeat yet' if age is None else f'last heartbeat {age:.0f} s ago'}"
    if not status.get("progress"):
        yield "  now        starting"
        return
    total = f" of {status['num_steps']}" if "num_steps" in status else ""
    rate = f", {1 / status['step_seconds']:.3g} steps/s" if status.get("step_seconds") else ""
    yield f"  now        {Progress.from_json(status['progress'])}{total}{rate}"
    if "epoch_eta" in status:
        whole = f", {shown_duration(status['eta'])} of the experiment" if status.get("max_epochs") else ""
        yield f"  left       {shown_duration(status['epoch_eta'])} of the epoch{whole}"


def _end(ended: dict[str, Any]) -> str:
    # The process that failed first says why; the others only that they lost it.
    error = ended["errors"][0]["error"].strip().splitlines() if ended["errors"] else []
    why = error[-1] if error else ended["reason"]
    return f"{ended['outcome']}: {why}" if why else str(ended["outcome"])


def _value_lines(status: dict[str, Any]) -> Iterator[str]:
    """Yield one row per register: the latest value, its course, and the value of the best epoch."""
    best = status.get("best") or {}
    rows = [("", "last", "", f"best (epoch {best['epoch']})" if best else "")]
    for name, value in status.get("last", {}).items():
        course = sparkline([float("nan") if one is None else one for one in status["history"].get(name, [])])
        rows.append((f"  {name}", shown_value(value), course, shown_value(best["values"].get(name)) if best else ""))
    if len(rows) > 1:
        yield from table(rows)


def _gpu_lines() -> Iterator[str]:
    gpus, problem = look_at_gpus()
    for gpu in gpus:
        yield f"gpu {gpu}"
    if problem:
        yield problem
