"""The command line of the training run."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import pipeline
from pipeline.command_lines import verb_line
from pipeline.errors import UsageError
from pipeline.paths import (
    DATA_HOME_VARIABLE,
    RESULTS_HOME_VARIABLE,
    ExperimentPaths,
    check_name,
    data_home,
    settings_names,
)

VERSION = f"training-pipeline {pipeline.__version__}"
DATA_HOME_HELP = f"default: ${DATA_HOME_VARIABLE}, else the current folder"
RESULTS_HOME_HELP = f"home of results, logs and error files; default: ${RESULTS_HOME_VARIABLE}, else the data home"
DEVICE_HELP = "cpu: do not use the accelerators of this machine (default: one for each process, if there are any)"
START = "start"
RESUME = "resume"
RESET = "reset"
AUTO = "auto"
_OPTIONS_WITH_VALUES = ("init_from", "stop_after_epoch", "device", "limit_batches")
# Results of a quick try have the name of the experiment with this behind it.
TRY_SUFFIX = ".try"

_EXAMPLES = """\
examples:
  torchrun --nproc-per-node=4 training_pipeline.py digits
  torchrun --nproc-per-node=2 training_pipeline.py digits --resume

exit codes: 0 finished, nothing to do, or stopped on request; 2 bad usage or invalid experiment;
3 results exist, are missing, or are in use; 130 interrupted at once; 1 anything else.
"""


@dataclass(frozen=True)
class Arguments:
    """What the user asked for."""

    experiment: str
    mode: str = START
    data_home: str | None = None
    overrides: tuple[str, ...] = ()
    init_from: str | None = None
    deterministic: bool = False
    no_validate: bool = False
    detect_anomaly: bool = False
    stop_after_epoch: int | None = None
    accept_edited_copy: bool = False
    device: str | None = None
    limit_batches: int | None = None

    @property
    def paths(self) -> ExperimentPaths:
        """The folders of the run; a quick try has results of its own."""
        home = data_home(self.data_home)
        if self.limit_batches is None:
            return ExperimentPaths(home, self.experiment)
        return ExperimentPaths(home, f"{self.experiment}{TRY_SUFFIX}", self.experiment)

    @property
    def flags(self) -> list[str]:
        """The options of a command line that asks for the same, without the experiment and the data home."""
        words = set_flags(self.overrides)
        # A try begins afresh by itself, and takes no mode.
        if self.mode != START and self.limit_batches is None:
            words.append(f"--{self.mode}")
        for field in fields(self):
            value = getattr(self, field.name)
            option = f"--{field.name.replace('_', '-')}"
            if value is True:
                words.append(option)
            elif field.name in _OPTIONS_WITH_VALUES and value is not None:
                words += [option, str(value)]
        return words

    @property
    def all_overrides(self) -> tuple[str, ...]:
        """The overrides with the flags that are short for one."""
        return (
            *self.overrides,
            *(["training.deterministic=true"] if self.deterministic else []),
            *(["training.evaluation_interval=0"] if self.no_validate else []),
            *([] if self.init_from is None else [f"training.init_from={Path(self.init_from).absolute()}"]),
            *([] if self.limit_batches is None else [f"data_loading.limit_batches={self.limit_batches}"]),
        )


class RankZeroParser(argparse.ArgumentParser):
    """Reports from rank zero only: under torchrun every process parses the same line."""

    def error(self, message: str) -> NoReturn:
        if is_rank_zero():
            self.print_usage(sys.stderr)
            print(f"{self.prog}: {message}", file=sys.stderr)
        else:
            # torchrun ends all processes as soon as one fails: let rank zero speak first.
            time.sleep(2)
        raise SystemExit(2)

    def print_help(self, file: object = None) -> None:
        if is_rank_zero():
            print(self.format_help(), end="")


def is_rank_zero() -> bool:
    """Return, before processes have joined, whether this one reports for all."""
    return os.environ.get("RANK", "0") == "0"


def parse_arguments(words: list[str] | None = None) -> Arguments:
    """Parse the command line; a wrong one ends the process with exit code 2."""
    parsed = _parser().parse_args(words)
    try:
        return read_arguments(parsed)
    except UsageError as error:
        _parser().error(str(error))


def read_arguments(parsed: argparse.Namespace) -> Arguments:
    """Return what was asked for, or refuse options that contradict each other."""
    mode = next((mode for mode in (RESUME, RESET, AUTO) if getattr(parsed, mode)), START)
    contradiction = _contradiction(mode, vars(parsed), parsed.set)
    if contradiction:
        raise UsageError(contradiction)
    others = {field.name for field in fields(Arguments)} - {"mode", "overrides"}
    return Arguments(
        # A try is never continued.
        mode=mode if parsed.limit_batches is None else RESET,
        overrides=tuple(parsed.set),
        **{name: getattr(parsed, name) for name in others},
    )


def _contradiction(mode: str, parsed: dict[str, Any], overrides: list[str]) -> str | None:
    if parsed["experiment"] is None:
        home = data_home(parsed["data_home"])
        known = ", ".join(settings_names(home)) or "none"
        return (
            f"an experiment must be named; in {home} there are: {known}\n"
            f"  to make one: {verb_line('new', 'NAME', home)}"
        )
    try:
        check_name(str(parsed["experiment"]))
    except UsageError as error:
        return str(error)
    if mode != START and parsed["limit_batches"] is not None:
        return f"--limit-batches does not go together with --{mode}: a quick try always starts from the beginning."
    if mode == RESUME and parsed["init_from"] is not None:
        return "--init-from works only when an experiment starts; a resumed one has its weights."
    if mode == RESUME and overrides:
        name = str(parsed["experiment"])
        home = data_home(parsed["data_home"])
        return (
            "--set works only when an experiment starts; a resumed one runs with the settings it started with.\n"
            f"  fix: {verb_line('new', 'VARIANT', home, '--from', name, *set_flags(overrides))}"
        )
    return None


def _parser() -> argparse.ArgumentParser:
    parser = RankZeroParser(
        prog="training_pipeline.py",
        description="Train an experiment stage by stage; kill it anywhere and run it again.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=VERSION)
    add_home_options(parser)
    add_training_options(parser)
    return parser


class _SetResultsHome(argparse.Action):
    """Sets the variable of the same meaning, which processes that this one starts inherit."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, option: str | None = None
    ) -> None:
        os.environ[RESULTS_HOME_VARIABLE] = str(Path(str(values)).absolute())


def add_home_options(parser: argparse.ArgumentParser) -> None:
    """Add where experiments lie, which every command has."""
    parser.add_argument("--data-home", metavar="DIR", help=DATA_HOME_HELP)
    parser.add_argument(
        "--results-home", metavar="DIR", action=_SetResultsHome, default=argparse.SUPPRESS, help=RESULTS_HOME_HELP
    )


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """Add what a run can be asked for, but for the data home."""
    parser.add_argument("experiment", nargs="?", help="name of a folder below experiment_settings")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--resume", action="store_true", help="continue an unfinished experiment from its last commit")
    mode.add_argument("--reset", action="store_true", help="delete the experiment's results and logs, then start")
    mode.add_argument("--auto", action="store_true", help="start, continue or do nothing, whichever is right")
    add_set_option(parser)
    parser.add_argument(
        "--init-from", metavar="FILE", help="start all modules without a source of their own from this file of weights"
    )
    parser.add_argument("--deterministic", action="store_true", help="short for --set training.deterministic=true")
    parser.add_argument("--no-validate", action="store_true", help="short for --set training.evaluation_interval=0")
    parser.add_argument("--detect-anomaly", action="store_true", help="let autograd name the operation that made a NaN")
    parser.add_argument("--stop-after-epoch", type=_epoch, metavar="N", help="stop cleanly after that epoch, resumable")
    parser.add_argument(
        "--limit-batches",
        type=_positive,
        metavar="N",
        help=f"a quick try with the first N batches of each split, with results of its own: EXP{TRY_SUFFIX}",
    )
    parser.add_argument(
        "--accept-edited-copy",
        action="store_true",
        help="resume although files of the frozen copy inside the results were edited",
    )
    parser.add_argument("--device", metavar="DEVICE", help=DEVICE_HELP)


def add_set_option(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Add the option that changes settings and parameters, which many verbs have."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FILE.KEY=VALUE",
        help=f"start with another setting or parameter; repeatable, e.g. --set parameters.lr=3e-4{more}",
    )


def set_flags(overrides: Iterable[str]) -> list[str]:
    """Return overrides as flags of a training run."""
    return [word for override in overrides for word in ("--set", override)]


def _positive(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, but is {number} instead")
    return number


def _epoch(word: str) -> int:
    number = int(word)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, but is {number} instead")
    return number
