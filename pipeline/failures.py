"""How a run ends that did not go well: who speaks, what is kept, and which exit code tells the truth."""

from __future__ import annotations

import sys
import time
import traceback

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from pipeline.errors import PipelineError
from pipeline.paths import ExperimentPaths
from pipeline.runtime.logs import LOGGER, log_file_only, start_file
from pipeline.runtime.processes import Processes, is_lost_peer

_INTERRUPTED = "Interrupted. The last commit is intact; continue with --auto."
_LOST_PEER = "Ended because another process of this run has failed or was killed. Continue with --auto."
_SECONDS_TO_LET_THE_CAUSE_BE_SEEN = 2
_OUT_OF_MEMORY = (
    "fix: lower batch_size in dataloaders/*.py (step_min_items keeps the step as it is), or use precision bf16."
)


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
        print(_INTERRUPTED, file=sys.stderr, flush=True)
        return 1
    if is_lost_peer(error):
        LOGGER.warning(_LOST_PEER)
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
    print(f"\nrank {processes.rank} failed:\n{_own_frames(error) or whole}", file=sys.stderr)
    if "out of memory" in str(error).lower() or isinstance(error, MemoryError):
        print(_OUT_OF_MEMORY, file=sys.stderr)
    sys.stderr.flush()
    _record(error)


def _own_frames(error: BaseException) -> str:
    """Return the traceback reduced to the author's own files, or nothing if none of them is involved."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/pymodules/" in frame.filename]
    if not frames:
        return ""
    return "".join([*traceback.format_list(frames), *traceback.format_exception_only(type(error), error)])


def _record(error: BaseException) -> None:
    """Leave the exception where torchrun looks for it."""
    get_error_handler().record_exception(error)
