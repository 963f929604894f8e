"""A run as a process: joins the other ranks, reports failures once, returns the exit code."""

from __future__ import annotations

import bdb
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Thread
from typing import NoReturn

from pipeline.arguments import Arguments, is_rank_zero
from pipeline.command_lines import LAUNCH_VARIABLE, has_launcher, run_line, verb_line
from pipeline.distributed.peer_monitor import Loss
from pipeline.distributed.processes import TIMEOUT_VARIABLE, Processes, is_lost_peer, is_silent_peer, longest_wait
from pipeline.errors import PipelineError
from pipeline.experiment.pymodules.user_code import author_frames
from pipeline.lifecycle.mode import describe_interrupt, how_to_continue
from pipeline.lifecycle.starts import read_starts, reset_flags
from pipeline.monitoring.journal import END, Journal
from pipeline.paths import ExperimentPaths
from pipeline.run import Watch, run
from pipeline.store.store import read_current_manifest
from pipeline.system.launcher_watchdog import end_launcher_later, may_start_again
from pipeline.system.logging import LOGGER, log_file_only, start_file
from pipeline.training.anomaly import AnomalyFound
from pipeline.training.batch_runner import is_out_of_memory

_INTERRUPTED_EXIT_CODE = 128 + signal.SIGINT
_LOST_PEER = "Ended because another process of this run has failed or was killed."
_SILENT_PEER = (
    "Ended because another process of this run did not answer for {:g} minutes ({}): it stands still, or its machine "
    "or the network has failed."
)
_LOST_MACHINE = "Machine {} has not answered for {} seconds: it or the network has failed. This process exits."
# Keys of the store: the first rank to set one reports for all.
_TO_FAIL = "to fail"
_TO_MISS_ANOTHER = "to miss another"
_SECONDS_FOR_THE_CAUSE_TO_BE_FIRST = 2
_SECONDS_TO_WRITE_LAST_MESSAGE = 5
_SEE_ABOVE = "see the error message above torchrun's own traceback"
_OUT_OF_MEMORY = (
    "out of memory; fix: lower batch_size in pymodules/dataloaders/*.py (a step keeps its items, which step_min_items",
    "in settings/data_loading.json decides), or set precision to bf16 in settings/training.json. Both are frozen since",
    "the start: start again with",
)


def run_worker(arguments: Arguments, watch: Watch | None = None) -> int:
    """Join the other processes, run, and return the exit code."""
    return run_in_group(partial(run, arguments, watch=watch), arguments.paths, arguments.device)


def run_in_group(
    act: Callable[[Processes], object], paths: ExperimentPaths | None = None, wanted_device: str | None = None
) -> int:
    """Join the other processes, act, and return an exit code; ``paths`` are those of a run that can be continued."""
    # The copy of an experiment must stay as it was copied.
    sys.dont_write_bytecode = True
    processes = Processes(rank=0 if is_rank_zero() else 1)
    try:
        processes = Processes.join(wanted_device)
        # Built now: when a machine is lost, folders that it serves may not answer any more.
        to_continue = "" if paths is None else how_to_continue(paths)
        monitor = processes.watch_peers(partial(_exit_without_peer, processes, paths, to_continue))
        act(processes)
        monitor.say_farewell()
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        return conclude_failure(error, processes, paths)
    return 0


def exit_now(code: int) -> NoReturn:
    """End at once: all is committed, and threads of a process group can abort an orderly exit with another code."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)


def _exit_without_peer(processes: Processes, paths: ExperimentPaths | None, to_continue: str, loss: Loss) -> NoReturn:
    """End while the run waits for a peer that will not answer; what it is writing is as after a kill."""
    if loss.silent_seconds is None:
        message = _LOST_PEER
        speaks = processes.is_first(_TO_MISS_ANOTHER)
    else:
        # The store may be on the lost machine, so ranks cannot agree on one that speaks.
        message = _LOST_MACHINE.format(loss.host, loss.silent_seconds)
        speaks = True
    failure = PipelineError(message + to_continue)
    if speaks:
        print(f"\n{failure}", file=sys.stderr, flush=True)
    # In a thread, because the files may be on a machine that is out of reach as well.
    writing = Thread(target=_write_last_message, args=(failure, processes, paths), daemon=True)
    writing.start()
    writing.join(_SECONDS_TO_WRITE_LAST_MESSAGE)
    if has_launcher() and not may_start_again():
        end_launcher_later()
    exit_now(1)


def _write_last_message(failure: PipelineError, processes: Processes, paths: ExperimentPaths | None) -> None:
    """Leave a last message in the log, in the journal and where torchrun looks for it."""
    _record_failure(str(failure), failure.exit_code)
    log_file_only(str(failure))
    if paths is not None and read_current_manifest(paths):
        journal = Journal(paths.journal_file, processes.rank)
        journal.start = len(read_starts(paths))
        journal.note(END, outcome="failed", error=str(failure))


def conclude_failure(error: BaseException, processes: Processes, paths: ExperimentPaths | None) -> int:
    """Report what happened, once over all processes, and return the exit code."""
    if isinstance(error, PipelineError):
        _report_refusal(error, processes, paths)
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        # Pressed once more, Ctrl+C would interrupt the message.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if processes.is_rank_zero and not _is_hosted():
            print(f"\n{describe_interrupt(paths) if paths else 'Interrupted.'}", file=sys.stderr, flush=True)
        return _INTERRUPTED_EXIT_CODE
    to_continue = "" if paths is None else how_to_continue(paths)
    if isinstance(error, bdb.BdbQuit):
        print(f"\nThe debugger was left.{to_continue}", file=sys.stderr, flush=True)
    elif is_lost_peer(error):
        if processes.is_first(_TO_MISS_ANOTHER):
            minutes = longest_wait().total_seconds() / 60
            message = _SILENT_PEER.format(minutes, TIMEOUT_VARIABLE) if is_silent_peer(error) else _LOST_PEER
            if is_silent_peer(error) or not _is_hosted():
                LOGGER.warning(message + to_continue)
        # torchrun takes the first process that ends for the cause: let the one that failed be first.
        time.sleep(_SECONDS_FOR_THE_CAUSE_TO_BE_FIRST)
        log_file_only(_format_traceback(error))
    else:
        _report_crash(error, processes, paths)
    return 1


def _is_hosted() -> bool:
    """Return whether a verb of ours has started this process; it reports how the processes ended, once all have."""
    return has_launcher() and LAUNCH_VARIABLE in os.environ


def _report_refusal(error: PipelineError, processes: Processes, paths: ExperimentPaths | None) -> None:
    """Print a message for the user without a stack trace, which goes into the log file."""
    speaks = processes.is_rank_zero if error.is_shared else processes.is_first(_TO_FAIL)
    if speaks:
        print(f"\n{error}", file=sys.stderr, flush=True)
        _log_traceback(error, processes, None if error.is_shared else paths)
    _record_failure(str(error), error.exit_code)
    # torchrun ends the others as soon as one fails, so the message must be out before.
    if error.is_shared and processes.has_joined:
        processes.barrier()
    elif not speaks:
        time.sleep(_SECONDS_FOR_THE_CAUSE_TO_BE_FIRST)


def _report_crash(error: BaseException, processes: Processes, paths: ExperimentPaths | None) -> None:
    """Print the traceback of the first rank that failed, with what can be done about it."""
    _log_traceback(error, processes, paths)
    # Of an author's mistake only the author's own frames: those of the pipeline say nothing about it.
    text = f"{error}\n" if isinstance(error, AnomalyFound) else author_frames(error) or _format_traceback(error)
    text += "".join(f"  {line}\n" for line in (_remedies(error, paths) if paths else ()))
    if processes.is_first(_TO_FAIL):
        print(f"\nrank {processes.rank} failed:\n{text}", end="", file=sys.stderr, flush=True)
    else:
        time.sleep(_SECONDS_FOR_THE_CAUSE_TO_BE_FIRST)
    _record_failure(text, 1, author_frames(error) or _format_traceback(error))


def _remedies(error: BaseException, paths: ExperimentPaths) -> Iterator[str]:
    """Yield what someone can do about a crash."""
    if paths.settings_name:
        yield f"fix: repair it in {paths.settings} and try again; nothing of a try is kept."
    elif is_out_of_memory(error):
        yield from _OUT_OF_MEMORY
        yield f"  {run_line(paths.name, paths.home, *reset_flags(paths))}"
        yield "or make a variant with"
        yield f"  {verb_line('new', 'VARIANT', paths.home, '--from', paths.name)}"
    elif not has_trained(paths):
        yield f"fix: repair it in {paths.settings} and start again; nothing was trained yet:"
        yield f"  {run_line(paths.name, paths.home)}"
    elif isinstance(error, AnomalyFound) or author_frames(error):
        yield f"fix: repair it in {paths.results / 'pymodules'}, the copy that runs, and continue with"
        yield f"  {run_line(paths.name, paths.home, '--resume', '--accept-edited-copy')}"
        yield f"or repair it in {paths.settings / 'pymodules'} and start again with"
        yield f"  {run_line(paths.name, paths.home, *reset_flags(paths))}"
    else:
        yield f"to continue: {run_line(paths.name, paths.home, '--resume')}"
    if paths.log_file.exists():
        yield f"the whole traceback: {paths.log_file}"


def has_trained(paths: ExperimentPaths) -> bool:
    """Return whether the current commit lies behind a training step."""
    manifest = read_current_manifest(paths)
    return manifest is not None and manifest.progress.has_trained


def _log_traceback(error: BaseException, processes: Processes, paths: ExperimentPaths | None) -> None:
    """Write a whole traceback into the log file; a process other than rank zero has to open it first."""
    if paths is not None and paths.logs.is_dir() and not processes.is_rank_zero:
        start_file(paths.name, paths.log_file)
    log_file_only(f"rank {processes.rank} failed:\n{_format_traceback(error)}")


def _format_traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def _record_failure(text: str, exit_code: int, callstack: str = _SEE_ABOVE) -> None:
    """Leave a message where torchrun and the verb ``train`` look for it; torchrun shows ``callstack`` in its table."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        more = {"py_callstack": callstack, "timestamp": str(int(time.time()))}
        message = {"message": text, "errorCode": exit_code, "extraInfo": more}
        # The run has failed already; a full disk must not hide why.
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": message}))
