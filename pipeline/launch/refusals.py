"""What a run would refuse at once, as far as it can be known without torch: for verbs that start it out of sight."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipeline.arguments import RESET, RESUME, Arguments, parse_arguments
from pipeline.errors import InvalidExperiment, Problem
from pipeline.experiment.pymodules.source_files import copied_files
from pipeline.experiment.settings.settings import read_contents
from pipeline.launch.torchrun_command import TrainingLine
from pipeline.lifecycle.frozen_copy import refuse_edited_copy
from pipeline.lifecycle.mode import check_settings_exist, choose_action, inspect_results, read_frozen_contents
from pipeline.paths import ExperimentPaths
from pipeline.store.store import read_current_manifest

# Its files are imported by others only, so one that nothing imports may be anything.
_UTILS = "utils"


def refuse_invalid(line: TrainingLine) -> None:
    """Refuse a run whose mode, settings or files are wrong; everything else is found by the run itself."""
    arguments = parse_arguments([line.experiment, "--data-home", str(line.paths.home), *line.flags])
    paths = line.paths
    situation = inspect_results(paths)
    if situation.is_finished and arguments.mode != RESET:
        if arguments.all_overrides:
            read_frozen_contents(paths, arguments)
    elif choose_action(arguments, paths, situation) == RESUME:
        manifest = read_current_manifest(paths)
        if manifest is not None:
            refuse_edited_copy(paths.results, manifest.copies, is_accepted=arguments.accept_edited_copy)
        read_frozen_contents(paths, arguments)
    else:
        check_settings_exist(paths)
        problems = list(_find_problems(paths, arguments))
        if problems:
            raise InvalidExperiment(problems)


def _find_problems(paths: ExperimentPaths, arguments: Arguments) -> Iterator[Problem]:
    try:
        read_contents(paths.settings / "settings", arguments.all_overrides)
    except InvalidExperiment as error:
        yield from error.problems
    try:
        files = copied_files(paths.settings)
    except InvalidExperiment as error:
        yield from error.problems
        return
    utils = paths.settings / "pymodules" / _UTILS
    for path in files:
        if path.suffix == ".py" and not path.is_relative_to(utils):
            yield from _syntax_problems(path)


def _syntax_problems(path: Path) -> Iterator[Problem]:
    try:
        compile(path.read_bytes(), path, "exec")
    except SyntaxError as error:
        yield Problem(f"{path}:{error.lineno}", f"must be valid Python: {error.msg}")
    except ValueError as error:
        # Null bytes, for example.
        yield Problem(str(path), f"must be valid Python: {error}")
