"""Write a settings folder: a copy of an example or of an experiment of yours, or commented stubs."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from pipeline.arguments import add_set_option
from pipeline.command_lines import verb_line
from pipeline.errors import StateConflict, UsageError, nearest
from pipeline.experiment.pymodules.source_files import copied_files
from pipeline.experiment.pymodules.stubs import stub_files
from pipeline.experiment.settings.settings import read_contents
from pipeline.lifecycle.frozen_copy import differing_files
from pipeline.lifecycle.mode import unknown_experiment
from pipeline.paths import ExperimentPaths, data_home, settings_names
from pipeline.store.store import read_current_manifest
from pipeline.system.formatting import folded

EXAMPLE = """\
examples:
  training-pipeline new my_digits --set parameters.lr=1e-3
  training-pipeline new mine --template minimal
  training-pipeline new mine --empty --dataset houses --module net
  training-pipeline new variant --from mine"""
_DEFAULT_TEMPLATE = "digits"
_DEFAULT_DATASETS = ["data"]
_DEFAULT_MODULES = ["net"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", nargs="?", help="name of the experiment to write")
    parser.add_argument("--list", action="store_true", help="list the templates, with one line each")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--template", help=f"an example to copy (default: {_DEFAULT_TEMPLATE})")
    source.add_argument("--from", dest="other", metavar="EXP", help="an experiment of yours to copy")
    source.add_argument("--empty", action="store_true", help="write stubs of the four files that you must write")
    parser.add_argument("--dataset", action="append", metavar="NAME", help="a dataset of --empty; repeatable")
    parser.add_argument("--module", action="append", metavar="NAME", help="a module of --empty; repeatable")
    add_set_option(parser)
    parser.add_argument("--exist-ok", action="store_true", help="leave an experiment that exists as it is")


def execute(arguments: argparse.Namespace) -> int:
    if arguments.list:
        indent = max(map(len, templates())) + 2
        for name in templates():
            print(folded(f"{name.ljust(indent)}{describe_template(name)}", indent))
        return 0
    if arguments.experiment is None:
        raise UsageError("Say which experiment to write.", "training-pipeline new my_digits")
    if not arguments.empty and (arguments.dataset or arguments.module):
        raise UsageError("--dataset and --module name the stubs of --empty, which is not given.")
    paths = ExperimentPaths(data_home(arguments.data_home), arguments.experiment)
    if paths.settings.exists():
        if arguments.exist_ok:
            return 0
        raise StateConflict(f"{paths.settings} exists already.\n  fix: choose another name, or delete the folder.")
    overrides = tuple(arguments.set)
    if arguments.empty:
        stubs = stub_files(arguments.dataset or _DEFAULT_DATASETS, arguments.module or _DEFAULT_MODULES)
        _write({name: text.encode() for name, text in stubs.items()}, None, paths.settings, overrides)
        following = f"{verb_line('check', paths.name, paths.home)}    (says what is still to be written)"
    else:
        source = _choose_source(arguments, paths)
        files = {path.relative_to(source).as_posix(): path.read_bytes() for path in copied_files(source)}
        _write(files, source, paths.settings, overrides)
        following = verb_line("train", paths.name, paths.home)
    print(f"wrote {paths.settings}")
    if arguments.other is not None:
        for line in _describe_source(paths.other(arguments.other), source):
            print(line)
    print(f"next: {following}")
    return 0


def templates_folder() -> Path:
    """Return the examples: inside an installed package, or next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "example_settings"
    return installed if installed.is_dir() else package.parent / "example_settings"


def templates() -> list[str]:
    """Return the names of the examples."""
    return sorted(path.name for path in templates_folder().iterdir() if (path / "pymodules").is_dir())


def describe_template(name: str) -> str:
    """Return the first paragraph of an example's page."""
    _, paragraph, *_ = (templates_folder() / name / "README.md").read_text().split("\n\n")
    return " ".join(paragraph.split())


def _choose_source(arguments: argparse.Namespace, paths: ExperimentPaths) -> Path:
    if arguments.other is None:
        known = templates()
        template = arguments.template or _DEFAULT_TEMPLATE
        if template not in known:
            raise UsageError(f"No template {template!r}; there are {', '.join(known)}.{nearest(template, known)}")
        return templates_folder() / str(template)
    other = paths.other(arguments.other)
    # What ran is the frozen copy, with the overrides it was started with.
    for folder in (other.results, other.settings):
        if (folder / "pymodules").is_dir():
            return folder
    raise unknown_experiment(other, settings_names(paths.home))


def _describe_source(other: ExperimentPaths, source: Path) -> Iterator[str]:
    """Yield where a copy comes from, and what was edited since that is not in it."""
    manifest = read_current_manifest(other) if source == other.results else None
    if manifest is None:
        return
    yield f"  from what {other.name} was started with, {source}"
    edited = differing_files(other.settings, manifest.sources) if other.settings.is_dir() else []
    if edited:
        yield f"  not in it, because edited since: {', '.join(edited)}"


def _write(files: Mapping[str, bytes], source: Path | None, target: Path, overrides: tuple[str, ...]) -> None:
    """Write next to the target and rename, so that an interrupted copy is never taken for an experiment."""
    # All that can be refused is read before anything is written.
    settings = (source or target) / "settings"
    original = read_contents(settings)
    contents = read_contents(settings, overrides)
    staging = target.with_name(f".{target.name}.new")
    shutil.rmtree(staging, ignore_errors=True)
    # Files that no override changes keep the author's own layout.
    changed = {
        f"settings/{name}.json": f"{json.dumps(content, indent=2)}\n".encode()
        for name, content in contents.items()
        if content != original[name]
    }
    for name, content in {**files, **changed}.items():
        path = staging / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    staging.rename(target)
