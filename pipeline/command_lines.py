"""The commands that messages print, built in this one place so that each can be copied and run as it stands.

A command names the data home, this Python and the way this process was launched: under torchrun with as many
processes, by the ``run`` verb, by the console command, or alone.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pipeline.paths import DATA_HOME_VARIABLE, data_home, results_home

# Set by verbs that start torchrun themselves: the verb and its options, as one shell line.
LAUNCH_VARIABLE = "TRAINING_PIPELINE_LAUNCH"
CONSOLE_COMMAND = "training-pipeline"
# Options of a run that are not part of its frozen settings, and that every start must give anew.
_KEPT_OPTIONS = ("--device",)
_ENTRY = "training_pipeline"
_ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def launched_by(verb: str, options: Sequence[str]) -> Iterator[None]:
    """In this block, and in processes that it starts, messages name this verb with these options.

    A verb that has started this process knows better.
    """
    if LAUNCH_VARIABLE in os.environ:
        yield
        return
    os.environ[LAUNCH_VARIABLE] = shlex.join([verb, *options])
    try:
        yield
    finally:
        del os.environ[LAUNCH_VARIABLE]


def kept_options(words: Sequence[str]) -> list[str]:
    """Return the options on a command line of a run that a line which continues it must repeat."""
    kept = []
    for word, following in zip(words, [*words[1:], ""], strict=False):
        option, equals, value = word.partition("=")
        if option in _KEPT_OPTIONS:
            kept += [option, value if equals else following]
    return kept


def run_line(
    experiment: str, home: Path, *flags: str, num_processes: int | None = None, launch: str | None = None
) -> str:
    """Return the line that runs an experiment the way this process was launched.

    A process that is not the run itself says how the run was: with ``num_processes``, by the verb in ``launch``.
    """
    # Those of another process, which are among the flags, have none on this command line.
    flags = (*flags, *kept_options(sys.argv))
    options = [*home_option(home), *flags]
    launch = launch or os.environ.get(LAUNCH_VARIABLE)
    if launch:
        verb, *own_options = shlex.split(launch)
        # Every other verb has options of its own; those of the training run stand behind two dashes.
        dashes = ["--"] if flags and verb != "train" else []
        return verb_line(verb, experiment, home, *own_options, *dashes, *flags)
    if Path(sys.argv[0]).name == CONSOLE_COMMAND and not has_launcher():
        processes = ["--nproc", str(num_processes)] if num_processes else []
        return shlex.join([show_program(CONSOLE_COMMAND), "train", experiment, *processes, *options])
    if has_launcher():
        num_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return shlex.join([*_launcher(num_processes), *_entry(), experiment, *options])


def verb_line(verb: str, experiment: str | None, home: Path, *words: str) -> str:
    """Return the line that calls a helper verb, for an experiment if one is given, of a data home."""
    own_words, flags = list(words), []
    if "--" in own_words:
        # What follows are flags of the run: an option of the verb must stand before them.
        flags = own_words[own_words.index("--") :]
        own_words = own_words[: own_words.index("--")]
    named = [] if experiment is None else [experiment]
    words_behind = [verb, *named, *own_words, *home_option(home), *flags]
    command = Path(sys.executable).parent / CONSOLE_COMMAND
    if _is_importable() and command.exists():
        return shlex.join([show_program(CONSOLE_COMMAND), *words_behind])
    line = shlex.join([*_python(), "-m", "pipeline", *words_behind])
    # A checkout that is not installed is found only from its own folder.
    return line if _current_folder() == _ROOT else f"PYTHONPATH={shlex.quote(str(_ROOT))} {line}"


def home_option(home: Path) -> list[str]:
    """Return the options that name a data home and a home of results, if they are not the default ones."""
    default = data_home(None) if _current_folder() or DATA_HOME_VARIABLE in os.environ else None
    results = results_home()
    return [
        *([] if home == default else ["--data-home", str(home)]),
        *([] if results is None else ["--results-home", str(results)]),
    ]


def has_launcher() -> bool:
    """Return whether torchrun has started this process and looks after it."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def torchrun_words() -> list[str]:
    """Return how torchrun of this Python is called."""
    torchrun = Path(sys.executable).parent / "torchrun"
    return [show_program("torchrun")] if torchrun.exists() else [*_python(), "-m", "torch.distributed.run"]


def show_program(name: str) -> str:
    """Return a program of this Python's folder as a person would type it: by its name if the shell would find it."""
    program = Path(sys.executable).parent / name
    if shutil.which(name) == str(program):
        return name
    folder = _current_folder()
    # A program in the current folder itself would be looked for in PATH.
    is_below = folder is not None and program.is_relative_to(folder) and program.parent != folder
    return str(program.relative_to(folder)) if folder is not None and is_below else str(program)


def _current_folder() -> Path | None:
    """Return the current folder, or None if it was deleted: a message must come out all the same."""
    try:
        return Path.cwd()
    except OSError:
        return None


def _launcher(num_processes: int | None) -> list[str]:
    if num_processes is None or (num_processes == 1 and not has_launcher()):
        return _python()
    num_machines = os.environ.get("GROUP_WORLD_SIZE", "1")
    # On several machines the same line is run on each; where they meet is not known here.
    several = [] if num_machines == "1" else [f"--nnodes={num_machines}", "--rdzv-backend=c10d"]
    meeting = [] if num_machines == "1" else ["--rdzv-endpoint=HOST:PORT"]
    return [*torchrun_words(), *several, *meeting, f"--nproc-per-node={num_processes}"]


def _python() -> list[str]:
    # A virtual environment has its Python under several names, of which a person types the shortest.
    names = ["python", "python3", Path(sys.executable).name]
    return [next((name for name in names if show_program(name) == name), show_program(names[-1]))]


def _entry() -> list[str]:
    """Return the script of a training run: as it was typed, in this folder, as a module, or by its path."""
    script = Path(sys.argv[0])
    if script.name == f"{_ENTRY}.py" and not script.is_absolute():
        return [str(script)]
    if _current_folder() == _ROOT:
        return [f"{_ENTRY}.py"]
    return ["-m", _ENTRY] if _is_importable() else [str(_ROOT / f"{_ENTRY}.py")]


def _is_importable() -> bool:
    """Return whether Python finds this package from any folder."""
    # Not by its first search path, which is the script's own folder, and not by a variable that may have been set for
    # this command alone.
    passing = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    lasting = [entry for entry in sys.path[1:] if entry and entry not in passing]
    return any(os.path.realpath(entry) == str(_ROOT) for entry in lasting)
