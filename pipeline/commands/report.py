"""Write one HTML page about one or several experiments, at any time."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.errors import UsageError
from pipeline.monitoring.experiment_state import read_existing_state
from pipeline.paths import ExperimentPaths, data_home
from pipeline.report.page import write_report
from pipeline.system.formatting import shown_bytes

EXAMPLE = "example:\n  training-pipeline report digits my_digits --out both.html"
_SEVERAL = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiments", nargs="+", metavar="EXP", help="several are laid over each other")
    where = f"experiment_logs/EXP/report.html, or {_SEVERAL} in the current folder for several experiments"
    parser.add_argument("--out", metavar="FILE", help=f"default: {where}")


def execute(arguments: argparse.Namespace) -> int:
    home = data_home(arguments.data_home)
    experiments = [read_existing_state(ExperimentPaths(home, name)) for name in dict.fromkeys(arguments.experiments)]
    if arguments.out is None and len(experiments) == 1:
        target = experiments[0].paths.report_file
        target.parent.mkdir(parents=True, exist_ok=True)
    else:
        target = Path(arguments.out or _SEVERAL).absolute()
        if target.is_dir():
            raise UsageError(f"--out must be a file, but {target} is a folder.", f"--out {target / _SEVERAL}")
        if not target.parent.is_dir():
            raise UsageError(f"--out must be in a folder that exists, but {target.parent} does not.")
    try:
        size = write_report(target, experiments)
    except OSError as error:
        # Also a file of the results that cannot be read: the error names it.
        reason = f"{error.filename or target} cannot be used: {error.strerror or error}."
        raise UsageError(reason, "choose another place with --out") from error
    print(f"report: {target} ({shown_bytes(size)})")
    return 0
