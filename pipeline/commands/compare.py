"""Show best and last values of experiments and the settings in which they differ."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator

from pipeline.arguments import TRY_SUFFIX
from pipeline.experiment.settings.parameters import PARAMETERS
from pipeline.experiment.settings.settings import read_contents
from pipeline.lifecycle.frozen_copy import digest_folder
from pipeline.monitoring.experiment_state import ExperimentState, describe_state, read_existing_state
from pipeline.paths import ExperimentPaths, data_home, results_names
from pipeline.system.formatting import as_json, flat, shown_value, table

EXAMPLE = "example:\n  training-pipeline compare digits variant --csv > both.csv"
# The values of one experiment by their names, as JSON has them.
Facts = dict[str, object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiments", nargs="*", metavar="EXP", help="default: all that have results, but no tries")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="one row per experiment, for spreadsheets")
    form.add_argument("--json", action="store_true", help="print everything as JSON")


def execute(arguments: argparse.Namespace) -> int:
    home = data_home(arguments.data_home)
    # Quick tries have seen a part of the data, so they are compared only if they are named.
    names = dict.fromkeys(
        arguments.experiments or (name for name in results_names(home) if not name.endswith(TRY_SUFFIX))
    )
    experiments = [read_existing_state(ExperimentPaths(home, name)) for name in names]
    facts = {experiment.paths.name: _collect_facts(experiment) for experiment in experiments}
    # All values are shown, and of settings and files those that differ.
    known = dict.fromkeys(name for own in facts.values() for name in own)
    shown = [name for name in known if _is_value(name) or len({repr(own.get(name)) for own in facts.values()}) > 1]
    if arguments.json:
        print(json.dumps({name: {key: own.get(key) for key in shown} for name, own in facts.items()}, indent=1))
    elif arguments.csv:
        writer = csv.writer(sys.stdout)
        writer.writerow(["experiment", *shown])
        for name, own in facts.items():
            writer.writerow([name, *("" if own.get(key) is None else own[key] for key in shown)])
    else:
        print("\n".join(_format_tables(facts, shown)))
    return 0


def _collect_facts(experiment: ExperimentState) -> Facts:
    """Return the state, each register at its best and its last epoch, every setting, and digests of pymodules."""
    best = experiment.best
    facts: Facts = {"state": describe_state(experiment)}
    facts["best epoch"] = best.epoch if best else None
    last_epoch: float = 0
    for register, curve in experiment.history().epochs("val").items():
        last_epoch = max([*curve.epochs[-1:], last_epoch])
        facts["last epoch"] = last_epoch
        facts[f"best {register}"] = best.values.get(register) if best else None
        facts[f"last {register}"] = as_json(curve.values[-1]) if curve.values else None
    results = experiment.paths.results
    # Settings have the names that --set knows them by.
    contents = read_contents(results / "settings")
    facts |= flat({name: content for name, content in contents.items() if content or name != PARAMETERS})
    digests = digest_folder(results)
    return facts | {name: digest[:8] for name, digest in digests.items() if name.startswith("pymodules/")}


def _is_value(name: str) -> bool:
    return name == "state" or name.startswith(("best ", "last "))


def _format_tables(facts: dict[str, Facts], shown: list[str]) -> Iterator[str]:
    if not facts:
        yield "no results to compare"
        return
    rows = {name: (name, *(_format_cell(name, own.get(name)) for own in facts.values())) for name in shown}
    yield from table([("", *facts), *(row for name, row in rows.items() if _is_value(name))])
    others = [row for name, row in rows.items() if not _is_value(name)]
    if others:
        yield ""
        yield from table([("differs", *facts), *others])
    elif len(facts) > 1:
        yield ""
        yield "settings and pymodules are alike"


def _format_cell(name: str, value: object) -> str:
    if value is None:
        return "-"
    # Settings keep all their digits: learning rates may differ in the fifth.
    if isinstance(value, float) and _is_value(name):
        return shown_value(value)
    return value if isinstance(value, str) else json.dumps(value)
