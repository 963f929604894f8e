"""Entry of a training run, alone or under torchrun, and of the console command; see ``--help``."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn


def _import_own_package() -> None:
    """Import the package next to this file, even if the current folder has a ``pipeline.py`` of the user's."""
    folder = Path(__file__).resolve().parent / "pipeline"
    spec = importlib.util.spec_from_file_location(
        "pipeline", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["pipeline"] = package
    spec.loader.exec_module(package)


if "pipeline" not in sys.modules:
    _import_own_package()

from pipeline.arguments import parse_arguments  # noqa: E402
from pipeline.command_lines import CONSOLE_COMMAND, LAUNCH_VARIABLE, has_launcher  # noqa: E402
from pipeline.requirements import check_requirements  # noqa: E402
from pipeline.verbs import VERBS  # noqa: E402

_OPTIONS_OF_THE_COMMAND = ("-h", "--help", "--version")


def main(words: list[str] | None = None) -> int:
    """Run a verb or an experiment and return the exit code."""
    check_requirements()
    words = sys.argv[1:] if words is None else words
    if _is_for_a_verb(words):
        from pipeline.__main__ import main as run_verb

        return run_verb(words)
    arguments = parse_arguments(words)
    from pipeline.system.stop_requests import end_with_launcher, report_early_interrupt, stop_signals_collected

    if has_launcher():
        # As early as possible: torchrun may be killed while torch is being imported.
        end_with_launcher()
    # Imported late, because torch takes seconds and a wrong command line should be refused at once. Ctrl+C must not end
    # in a traceback out of an import.
    if LAUNCH_VARIABLE in os.environ:
        # The verb that hosts this process says it. Until the run listens, it is ended at once.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        from pipeline.worker import run_worker

        return run_worker(arguments)
    with stop_signals_collected() as received:
        from pipeline.worker import run_worker
    return report_early_interrupt(received[0]) if received else run_worker(arguments)


def _is_for_a_verb(words: list[str]) -> bool:
    """Return whether a command line names a verb, or could only be that of one."""
    if not words or Path(sys.argv[0]).name != CONSOLE_COMMAND:
        return words[:1] != [] and words[0] in VERBS
    # A run has one word that is not an option: the experiment.
    has_two_names = len(words) > 1 and not any(word.startswith("-") for word in words[:2])
    return words[0] in {*VERBS, *_OPTIONS_OF_THE_COMMAND} or has_two_names


def run_and_exit() -> NoReturn:
    """Run ``main`` as a program of its own: nothing of what Python and torch do at exit may change its end."""
    code = main()
    # All has been said; a late Ctrl+C would only add a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Verbs that do not need torch have no process group that could disturb an orderly exit.
    if "torch" not in sys.modules:
        sys.exit(code)
    from pipeline.worker import exit_now

    exit_now(code)


if __name__ == "__main__":
    run_and_exit()
