"""Write a settings folder that trains as it is."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from pipeline.arguments import add_set_option
from pipeline.command_lines import run_line
from pipeline.errors import StateConflict, UsageError
from pipeline.experiment.pymodules.source_files import copied_files
from pipeline.experiment.settings.settings import read_contents
from pipeline.lifecycle.mode import unknown_experiment
from pipeline.paths import ExperimentPaths, data_home, settings_names

EXAMPLE = "example:\n  python -m pipeline new my_digits --template digits --set training.seed=1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", nargs="?", help="name of the experiment to write")
    parser.add_argument("--list", action="store_true", help="list the templates")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--template", default="digits", help="an example to copy (default: digits)")
    source.add_argument("--from", dest="other", metavar="EXP", help="an experiment of yours to copy")
    add_set_option(parser)
    parser.add_argument("--exist-ok", action="store_true", help="leave an experiment that exists as it is")


def execute(arguments: argparse.Namespace) -> int:
    if arguments.list:
        print("\n".join(templates()))
        return 0
    if arguments.experiment is None:
        raise UsageError("Say which experiment to write.", EXAMPLE.splitlines()[-1].strip())
    paths = ExperimentPaths(data_home(arguments.data_home), arguments.experiment)
    if paths.settings.exists():
        if arguments.exist_ok:
            return 0
        raise StateConflict(f"{paths.settings} exists already.\n  fix: choose another name, or delete the folder.")
    _write(_choose_source(arguments, paths), paths.settings, tuple(arguments.set))
    print(f"wrote {paths.settings}")
    print(f"next: {run_line(paths.name, paths.home, num_processes=2)}")
    return 0


def templates_folder() -> Path:
    """Return the examples: inside an installed package, or next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "example_settings"
    return installed if installed.is_dir() else package.parent / "example_settings"


def templates() -> list[str]:
    """Return the names of the examples."""
    return sorted(path.name for path in templates_folder().iterdir() if (path / "pymodules").is_dir())


def _choose_source(arguments: argparse.Namespace, paths: ExperimentPaths) -> Path:
    if arguments.other is None:
        known = templates()
        if arguments.template not in known:
            raise UsageError(f"No template {arguments.template!r}; there are {', '.join(known)}.")
        return templates_folder() / str(arguments.template)
    other = paths.other(arguments.other)
    # What ran is the frozen copy, with the overrides it was started with.
    for folder in (other.results, other.settings):
        if (folder / "pymodules").is_dir():
            return folder
    raise unknown_experiment(other, settings_names(paths.home))


def _write(source: Path, target: Path, overrides: tuple[str, ...]) -> None:
    """Copy next to the target and rename, so that an interrupted copy is never taken for an experiment."""
    # All that can be refused is read before anything is written.
    original = read_contents(source / "settings")
    contents = read_contents(source / "settings", overrides)
    files = copied_files(source)
    staging = target.with_name(f".{target.name}.new")
    shutil.rmtree(staging, ignore_errors=True)
    for path in files:
        copy = staging / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    # Files that no override changes keep the author's own layout.
    for name, content in contents.items():
        if content != original[name]:
            (staging / "settings" / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    staging.rename(target)
