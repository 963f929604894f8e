"""Entry of a training run, alone or under torchrun; see ``--help``."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from typing import NoReturn

from pipeline.arguments import has_launcher, is_rank_zero, parse_arguments
from pipeline.runtime.signals import end_with_launcher


def main(words: list[str] | None = None) -> int:
    """Run an experiment and return an exit code that tells the truth."""
    arguments = parse_arguments(words)
    if has_launcher():
        end_with_launcher()
    # Only a valid command line is worth the seconds that importing torch takes.
    from pipeline.failures import conclude_failure
    from pipeline.paths import ExperimentPaths, data_home
    from pipeline.run import run
    from pipeline.runtime.processes import Processes

    # The copy of an experiment must stay as it was copied.
    sys.dont_write_bytecode = True
    processes = Processes(rank=0 if is_rank_zero() else 1)
    try:
        processes = Processes.join()
        run(arguments, processes)
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        return conclude_failure(error, processes, ExperimentPaths(data_home(arguments.data_home), arguments.experiment))
    return 0


def _leave(code: int) -> NoReturn:
    """End at once: all is committed, and threads of a process group can abort an orderly exit with another code."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)


if __name__ == "__main__":
    _leave(main())
