"""Show how far experiments have come, without touching them."""

from __future__ import annotations

import argparse
import json
from typing import Any

from pipeline.paths import ExperimentPaths, data_home, results_names, settings_names
from pipeline.progress import Progress
from pipeline.results.lock import is_held, read_owner
from pipeline.results.situation import look, unknown_experiment
from pipeline.results.status import read_status

EXAMPLE = "example:\n  python -m pipeline status digits --json"
EXIT_CODES = {"finished": 0, "running": 4, "unfinished": 5, "new": 6}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiments", nargs="*", metavar="EXP", help="default: all of them, one line each")
    parser.add_argument("--json", action="store_true", help="print what is known as JSON")
    codes = ", ".join(f"{code} {state}" for state, code in EXIT_CODES.items())
    parser.add_argument("--exit-code", action="store_true", help=f"tell the state by the exit code: {codes}")
    parser.add_argument("--data-home", metavar="DIR")


def execute(arguments: argparse.Namespace) -> int:
    home = data_home(arguments.data_home)
    known = sorted({*settings_names(home), *results_names(home)})
    for name in arguments.experiments:
        if ExperimentPaths(home, name).name not in known:
            raise unknown_experiment(name, known)
    found = {name: describe(ExperimentPaths(home, name)) for name in arguments.experiments or known}
    if arguments.json:
        print(json.dumps(found, indent=1))
    elif arguments.experiments:
        print("\n\n".join(_block(name, status) for name, status in found.items()))
    else:
        width = max(map(len, found), default=0)
        print("\n".join(f"{name:{width}}  {_line(status)}" for name, status in found.items()) or "no experiments")
    states = [status["state"] for status in found.values()]
    return max((EXIT_CODES[state] for state in states), default=0) if arguments.exit_code else 0


def describe(paths: ExperimentPaths) -> dict[str, Any]:
    """Return what is known of one experiment; the committed state tells, the status file adds."""
    situation = look(paths)
    status = read_status(paths.status_file) if situation.exists else {}
    if situation.is_finished:
        state = "finished"
    elif is_held(paths):
        state = "running"
    else:
        state = "unfinished" if situation.exists else "new"
    committed = situation.progress.as_json() if situation.progress else None
    owner = read_owner(paths) if state == "running" else None
    return {**status, "state": state, "committed": committed, "owner": owner}


def _line(status: dict[str, Any]) -> str:
    committed = status["committed"]
    stands = str(Progress.from_json(committed)) if committed else ""
    return f"{status['state']:10}  {stands:32}  {_values(status.get('last'))}".rstrip()


def _block(name: str, status: dict[str, Any]) -> str:
    lines = [f"{name}: {status['state']}"]
    if status["committed"]:
        lines.append(f"  committed  {Progress.from_json(status['committed'])}")
    if status["owner"]:
        owner = status["owner"]
        lines.append(f"  running    pid {owner.get('pid')} on {owner.get('host')} since {owner.get('started')}")
        lines.append(
            f"  now        {Progress.from_json(status['progress'])}"
            if status.get("progress")
            else "  now        starting"
        )
    if status.get("last"):
        lines.append(f"  last       {_values(status['last'])}")
    if status.get("best"):
        lines.append(f"  best       epoch {status['best']['epoch']}, {_values(status['best']['values'])}")
    if status.get("updated"):
        lines.append(f"  updated    {status['updated']}")
    return "\n".join(lines)


def _values(values: dict[str, float | None] | None) -> str:
    return ", ".join(f"{name}: {'nan' if value is None else f'{value:.4f}'}" for name, value in (values or {}).items())
