"""What is found on disk, and what the command's mode makes of it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from pipeline.arguments import AUTO, RESET, RESUME, START, Arguments, set_flags
from pipeline.command_lines import run_line, verb_line
from pipeline.errors import StateConflict, UsageError, nearest
from pipeline.experiment.settings.settings import Contents, differing_overrides, read_contents
from pipeline.lifecycle.frozen_copy import has_changed_since_start
from pipeline.lifecycle.starts import reset_flags
from pipeline.paths import (
    LOCK_FILE,
    LOGS_FOLDER,
    OLD_TOKEN_PREFIX,
    RESERVED,
    RESULTS_FOLDER,
    SETTINGS_FOLDER,
    STARTS_FILE,
    STATE_FILE,
    STATUS_FILE,
    ExperimentPaths,
    results_names,
    settings_names,
)
from pipeline.progress import Progress
from pipeline.store.lock import check_free
from pipeline.store.manifest import read_state

# Start again, because nothing was trained and the settings folder has changed.
RESTART = "restart"
# What a run keeps in its results. The last one is of earlier versions; a stop request lies in the claim today.
OWN_NAMES = RESERVED | {STATE_FILE, LOCK_FILE, STATUS_FILE, f".{STATUS_FILE}.new", STARTS_FILE, "stop.request"}


@dataclass(frozen=True)
class Situation:
    """Whether results exist, and how far they have come; no progress means it cannot be read."""

    exists: bool
    progress: Progress | None = None
    # The number of the current commit.
    generation: int | None = None

    @property
    def is_finished(self) -> bool:
        return self.progress is not None and self.progress.is_finished


def inspect_results(paths: ExperimentPaths) -> Situation:
    """Look at the results without touching them, and refuse places that are not safe to use."""
    _refuse_links(paths.top / RESULTS_FOLDER, paths.name)
    _refuse_groups(paths)
    state = read_state(paths.state_file)
    if state is not None:
        return Situation(True, state.progress, state.generation)
    # Results whose state file is missing or damaged must not pass for a new experiment, which would delete them.
    has_commits = paths.generations.is_dir() and any(paths.generations.iterdir())
    return Situation(has_commits or paths.state_file.exists())


def choose_action(arguments: Arguments, paths: ExperimentPaths, found: Situation) -> str:
    """Return START, RESUME, RESTART or RESET, or refuse; a finished experiment never comes here without RESET."""
    # An early refusal only: another run may still come first, so what counts is the lock that is taken later.
    check_free(paths)
    if arguments.mode == RESET:
        # Only a reset deletes logs; a run may write them through a link.
        _refuse_links(paths.top / LOGS_FOLDER, paths.name)
        return RESET
    if not found.exists:
        if arguments.mode == RESUME and not paths.settings.is_dir():
            known = all_names(paths.home)
            elsewhere = "go to the folder that has it, or name that folder with --data-home DIR"
            raise unknown_experiment(paths, known, fix=_elsewhere(paths) or elsewhere)
        if arguments.mode == RESUME:
            raise StateConflict(
                f"Experiment {paths.name!r} has no results to resume.\n"
                f"  to start it: {run_line(paths.name, paths.home)}\n"
                "  --auto in place of --resume starts or continues, whichever is right."
            )
        return START
    if arguments.mode != RESUME and found.progress is not None and not found.progress.has_trained:
        # The first crash of a new experiment: what is left over is worth nothing if its settings were repaired.
        return RESTART if has_changed_since_start(paths, arguments.all_overrides) else RESUME
    if arguments.mode in (RESUME, AUTO):
        return RESUME
    stands = f"it stands at {found.progress}" if found.progress else "its state file is damaged"
    raise StateConflict(
        f"Experiment {paths.name!r} has unfinished results: {stands}.\n"
        f"  to continue:    {run_line(paths.name, paths.home, '--resume')}\n"
        f"  to start again: {run_line(paths.name, paths.home, *reset_flags(paths))}    (deletes its results and logs)"
    )


def how_to_continue(paths: ExperimentPaths) -> str:
    """Return the end of a message about a run that did not end by itself."""
    if paths.settings_name:
        return " Nothing of a try is kept."
    return f" The last commit is intact.\n  to continue: {run_line(paths.name, paths.home, '--auto')}"


def describe_interrupt(paths: ExperimentPaths) -> str:
    """Return what became of a run that was interrupted at once, and how to continue it."""
    if paths.settings_name or paths.state_file.exists():
        return f"Interrupted.{how_to_continue(paths)}"
    return f"Interrupted before the first commit.\n  to start again: {run_line(paths.name, paths.home)}"


def check_results_exist(paths: ExperimentPaths) -> None:
    """Refuse an experiment that never committed anything, naming those that did."""
    if not inspect_results(paths).exists:
        raise unknown_experiment(paths, results_names(paths.home), "results of")


def unknown_experiment(paths: ExperimentPaths, known: list[str], what: str = "experiment", fix: str = "") -> UsageError:
    """Return the refusal of a name that nothing stands for, with the names there are."""
    there = f"there are {', '.join(known) or 'none'}.{nearest(paths.name, known)}"
    return UsageError(f"No {what} {paths.name!r} in {paths.home}; {there}", fix)


def check_known(paths: ExperimentPaths) -> None:
    """Refuse a name that is neither an experiment's settings nor its results, naming those that are."""
    known = all_names(paths.home)
    if paths.name not in known:
        raise unknown_experiment(paths, known, fix=_elsewhere(paths) or verb_line("new", paths.name, paths.home))


def all_names(home: Path) -> list[str]:
    """Return every experiment of a data home, with or without results."""
    return sorted({*settings_names(home), *results_names(home)})


def check_settings_exist(paths: ExperimentPaths) -> None:
    """Refuse an experiment without a settings folder, naming those that exist."""
    if (paths.settings / "pymodules").is_dir():
        return
    known = settings_names(paths.home)
    if paths.settings.is_dir():
        what = f"{paths.settings} must hold a folder pymodules, but has none."
        stubs = verb_line("new", "STUBS", paths.home, "--empty")
        raise UsageError(what, f"{stubs}    (writes the four files that every experiment has)")
    raise unknown_experiment(paths, known, fix=_elsewhere(paths) or _make_or_correct(paths, known))


def _make_or_correct(paths: ExperimentPaths, known: list[str]) -> str:
    """Return how to run the experiment that was probably meant, or how to make one of this name."""
    close = get_close_matches(paths.name, known, n=1, cutoff=0.5)
    if close:
        return run_line(close[0], paths.home)
    return f"{verb_line('new', paths.name, paths.home)}    (to make it)"


def _elsewhere(paths: ExperimentPaths) -> str:
    """Return how to name the data home or the experiment, if it is found nearby; else an empty string."""
    for folder in (SETTINGS_FOLDER, RESULTS_FOLDER):
        # A path that was completed by the shell.
        inner = paths.name.removeprefix(f"{folder}/").rstrip("/")
        if inner != paths.name and inner in all_names(paths.home):
            return f"name the experiment without its folder: {inner}"
    below = sorted(entry for entry in paths.home.iterdir() if entry.is_dir()) if paths.home.is_dir() else []
    for home in (*paths.home.parents, *below):
        try:
            other = ExperimentPaths(home, paths.name)
            if other.settings.is_dir() or other.state_file.exists():
                return f"{paths.name} is in {home}: add --data-home {shlex.quote(str(home))}"
        except OSError:
            continue
    return ""


def check_is_try(paths: ExperimentPaths) -> None:
    """Refuse results that a quick try would delete although they are not those of one."""
    own_settings = paths.other(paths.name).settings
    if own_settings.exists():
        raise StateConflict(
            f"A try would write to the results of {paths.name!r}, which is an experiment of its own: {own_settings}."
        )
    if not inspect_results(paths).exists:
        return
    contents = read_contents(paths.results / "settings")
    if contents["data_loading"].get("limit_batches") is None:
        raise StateConflict(
            f"{paths.results} holds results that --limit-batches has not made, and would delete.",
        )


def read_frozen_contents(paths: ExperimentPaths, arguments: Arguments) -> Contents:
    """Return the frozen settings, or refuse a command line that would change them."""
    folder = paths.results / "settings"
    contents = read_contents(folder)
    differing = differing_overrides(contents, arguments.all_overrides, folder)
    if differing:
        raise UsageError(
            f"{', '.join(differing)} would change settings that are frozen since the experiment started.",
            verb_line("new", "VARIANT", paths.home, "--from", paths.name, *set_flags(differing)),
        )
    return contents


def _refuse_links(top: Path, name: str) -> None:
    """Refuse a link in place of an experiment's folder, or of a group of its name: a reset could delete anything."""
    path = top
    for segment in name.split("/"):
        path = path / segment
        if path.is_symlink():
            raise UsageError(
                f"{path} must be a folder, but is a link to {path.readlink()}.",
                "link a folder above the experiment instead, or set --data-home",
            )
        if path.exists() and not path.is_dir():
            raise UsageError(f"{path} must be a folder, but is a file.")


def _refuse_groups(paths: ExperimentPaths) -> None:
    """Refuse an experiment that lies inside another one's results, or whose results hold other things."""
    segments = paths.name.split("/")
    for count in range(1, len(segments)):
        above = "/".join(segments[:count])
        other = paths.other(above)
        # Any one of these is enough: a start that was killed early has a lock and no state file yet.
        if other.state_file.exists() or other.generations.exists() or other.lock_file.exists():
            raise UsageError(f"{paths.name!r} must not lie inside an experiment, but {above!r} is one.")
    # With a state file it is an experiment of ours, whatever else lies in it.
    if not paths.results.is_dir() or paths.state_file.exists():
        return
    names = [entry.name for entry in paths.results.iterdir()]
    foreign = sorted(name for name in names if name not in OWN_NAMES and not name.startswith(OLD_TOKEN_PREFIX))
    if foreign:
        raise UsageError(
            f"{paths.results} must be empty or made by this program, but it has no {STATE_FILE} and holds "
            f"{', '.join(foreign[:5])}.",
            "choose another name",
        )
