"""A run as a process: how it joins the others, who speaks when it fails, and which exit code tells the truth."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from pipeline.arguments import Arguments, is_rank_zero
from pipeline.errors import PipelineError
from pipeline.experiment.user_code import author_frames
from pipeline.paths import ExperimentPaths, data_home
from pipeline.run import Watch, run
from pipeline.runtime.logs import LOGGER, log_file_only, start_file
from pipeline.runtime.processes import Processes, is_lost_peer

_INTERRUPTED = "Interrupted."
_LOST_PEER = "Ended because another process of this run has failed or was killed."
_CONTINUE = " The last commit is intact; continue with --auto."
_SECONDS_TO_LET_THE_CAUSE_BE_SEEN = 2
_OUT_OF_MEMORY = (
    "fix: lower batch_size in dataloaders/*.py (step_min_items keeps the step as it is), or use precision bf16."
)


def attempt(arguments: Arguments, watch: Watch | None = None) -> int:
    """Join the other processes, run, and return an exit code that tells the truth."""
    paths = ExperimentPaths(data_home(arguments.data_home), arguments.experiment)
    return join_and_act(lambda processes: run(arguments, processes, watch=watch), paths)


def join_and_act(act: Callable[[Processes], object], paths: ExperimentPaths | None = None) -> int:
    """Join the other processes, act, and return an exit code; ``paths`` are those of a run that can be continued."""
    # The copy of an experiment must stay as it was copied.
    sys.dont_write_bytecode = True
    processes = Processes(rank=0 if is_rank_zero() else 1)
    try:
        processes = Processes.join()
        act(processes)
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        return conclude_failure(error, processes, paths)
    return 0


def leave(code: int) -> NoReturn:
    """End at once: all is committed, and threads of a process group can abort an orderly exit with another code."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)


def conclude_failure(error: BaseException, processes: Processes, paths: ExperimentPaths | None) -> int:
    """Tell what happened, once over all processes, and return the exit code."""
    if isinstance(error, PipelineError):
        if processes.is_rank_zero or not error.is_shared:
            print(f"\n{error}", file=sys.stderr, flush=True)
            log_file_only(str(error))
        if error.is_shared:
            # Rank zero has spoken: only now may torchrun see a process fail and end the others.
            processes.barrier()
        else:
            _record(error)
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        print(_INTERRUPTED + (_CONTINUE if paths else ""), file=sys.stderr, flush=True)
        return 1
    if is_lost_peer(error):
        LOGGER.warning(_LOST_PEER + (_CONTINUE if paths else ""))
        # torchrun takes the first process that ends for the cause: let the one that failed be first.
        time.sleep(_SECONDS_TO_LET_THE_CAUSE_BE_SEEN)
        log_file_only("".join(traceback.format_exception(type(error), error, error.__traceback__)))
        return 1
    _tell_crash(error, processes, paths)
    return 1


def _tell_crash(error: BaseException, processes: Processes, paths: ExperimentPaths | None) -> None:
    whole = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    if paths is not None and paths.logs.is_dir():
        if not processes.is_rank_zero:
            start_file(paths.name, paths.log_file)
        log_file_only(f"rank {processes.rank} failed:\n{whole}")
    print(f"\nrank {processes.rank} failed:\n{author_frames(error) or whole}", file=sys.stderr)
    if "out of memory" in str(error).lower() or isinstance(error, MemoryError):
        print(_OUT_OF_MEMORY, file=sys.stderr)
    sys.stderr.flush()
    _record(error)


def _record(error: BaseException) -> None:
    """Leave the exception where torchrun looks for it."""
    get_error_handler().record_exception(error)
