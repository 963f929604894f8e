"""Entry of a training run, alone or under torchrun; see ``--help``."""

from __future__ import annotations

import multiprocessing
import os
import sys
from typing import NoReturn

from pipeline.arguments import parse_arguments


def main(words: list[str] | None = None) -> int:
    """Run an experiment and return an exit code that tells the truth."""
    arguments = parse_arguments(words)
    # Only a valid command line is worth the seconds that importing torch takes.
    from pipeline.failures import conclude_failure
    from pipeline.paths import ExperimentPaths, data_home
    from pipeline.run import run
    from pipeline.runtime.processes import Processes

    # The copy of an experiment must stay as it was copied.
    sys.dont_write_bytecode = True
    processes = Processes()
    try:
        processes = Processes.join()
        run(arguments, processes)
    except (Exception, KeyboardInterrupt) as error:
        return conclude_failure(error, processes, ExperimentPaths(data_home(arguments.data_home), arguments.experiment))
    return 0


def _leave(code: int) -> NoReturn:
    """End at once: all is committed, and threads of a process group can abort an orderly exit with another code."""
    sys.stdout.flush()
    sys.stderr.flush()
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)


if __name__ == "__main__":
    _leave(main())
