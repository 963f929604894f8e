"""Show best and last values of experiments and the settings in which they differ."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator
from typing import Any

from pipeline.experiment.settings.settings import read_contents
from pipeline.lifecycle.frozen_copy import digest_folder
from pipeline.lifecycle.mode import check_results_exist
from pipeline.monitoring.curves import History
from pipeline.monitoring.experiment_state import state_of
from pipeline.paths import ExperimentPaths, data_home, results_names
from pipeline.store.store import read_current_manifest
from pipeline.system.formatting import as_json, flat, shown_value, table

EXAMPLE = "example:\n  python -m pipeline compare digits variant --csv > both.csv"
Facts = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiments", nargs="*", metavar="EXP", help="default: all that have results")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="one row per experiment, for spreadsheets")
    form.add_argument("--json", action="store_true", help="print everything as JSON")


def execute(arguments: argparse.Namespace) -> int:
    home = data_home(arguments.data_home)
    everything = [ExperimentPaths(home, name) for name in arguments.experiments or results_names(home)]
    for paths in everything:
        check_results_exist(paths)
    facts = {paths.name: {**_values(paths), **_described(paths)} for paths in everything}
    differing = _differing(facts)
    if arguments.json:
        print(json.dumps({name: {key: one.get(key) for key in differing} for name, one in facts.items()}, indent=1))
    elif arguments.csv:
        _write_csv(facts, differing)
    else:
        print("\n".join(_lines(facts, differing)))
    return 0


def _values(paths: ExperimentPaths) -> Facts:
    """Return where an experiment stands, and each register at its best epoch and at the last one."""
    manifest = read_current_manifest(paths)
    best = (manifest.run_state.get("best") if manifest else None) or {"epoch": None, "values": {}}
    facts: Facts = {"state": state_of(paths), "best epoch": best["epoch"]}
    for register, curve in History(paths).epochs("val").items():
        facts["last epoch"] = max([*curve.epochs[-1:], facts.get("last epoch") or 0])
        facts[f"best {register}"] = best["values"].get(register)
        facts[f"last {register}"] = as_json(curve.values[-1]) if curve.values else None
    return facts


def _described(paths: ExperimentPaths) -> Facts:
    """Return every setting by its name for --set, and every pymodule by its digest."""
    facts = dict(flat(read_contents(paths.results / "settings")))
    digests = digest_folder(paths.results)
    return facts | {name: digest[:8] for name, digest in digests.items() if name.startswith("pymodules/")}


def _differing(facts: dict[str, Facts]) -> list[str]:
    """Return the rows worth showing: all values, and the settings and files that are not alike."""
    names = list(dict.fromkeys(name for one in facts.values() for name in one))
    return [name for name in names if _is_value(name) or len({repr(one.get(name)) for one in facts.values()}) > 1]


def _is_value(name: str) -> bool:
    return name == "state" or name.startswith(("best ", "last "))


def _lines(facts: dict[str, Facts], differing: list[str]) -> Iterator[str]:
    if not facts:
        yield "no results to compare"
        return
    header = ("", *facts)
    values = [(name, *(_cell(one.get(name)) for one in facts.values())) for name in differing if _is_value(name)]
    yield from table([header, *values])
    others = [(name, *(_cell(one.get(name)) for one in facts.values())) for name in differing if not _is_value(name)]
    if others:
        yield ""
        yield from table([("differs", *facts), *others])
    elif len(facts) > 1:
        yield ""
        yield "settings and pymodules are alike"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return shown_value(value) if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def _write_csv(facts: dict[str, Facts], differing: list[str]) -> None:
    writer = csv.writer(sys.stdout)
    writer.writerow(["experiment", *differing])
    for name, one in facts.items():
        writer.writerow([name, *(one.get(key, "") if one.get(key) is not None else "" for key in differing)])
