"""torch's elastic agent in this process: starts the training processes, forwards signals, prints the final message.

torchrun prints a traceback of its own below every error and after Ctrl+C. Here nothing is printed below the messages of
the run, and the exit code is that of the process that failed first.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import uuid
from pathlib import Path

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure, get_error_handler
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from pipeline.launch.torchrun_command import TrainingLine
from pipeline.lifecycle.mode import describe_interrupt, how_to_continue
from pipeline.system.stop_requests import report_early_interrupt

# torch's agent raises at these signals unless this names none.
_HANDLED_BY_TORCH = "TORCHELASTIC_SIGNALS_TO_HANDLE"
# The first Ctrl+C asks to stop, the second interrupts; from the third on processes are killed.
_MAX_PASSED_ON = 2
_SIGNAL_EXIT_CODE = 128
_INTERRUPTED = _SIGNAL_EXIT_CODE + signal.SIGINT
_RENDEZVOUS_SECONDS = 900


class _Agent(LocalElasticAgent):
    """torch's agent, which passes on the signals that this process has received instead of ending at them."""

    def __init__(self, spec: WorkerSpec, logs: DefaultLogsSpecs, received: list[int]) -> None:
        super().__init__(spec, logs)
        self._received = received
        self._num_passed_on = 0

    # Called ten times a second.
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        for number in self._received[self._num_passed_on :]:
            self._num_passed_on += 1
            passed_on = number if self._num_passed_on <= _MAX_PASSED_ON else signal.SIGKILL
            for worker in worker_group.workers:
                # A worker leads a session of its own, so Ctrl+C in a terminal does not reach it.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.id, passed_on)
        result: RunResult = super()._monitor_workers(worker_group)
        return result


def host_training(line: TrainingLine, received: list[int]) -> int:
    """Train on several processes of this machine until they have ended; return the exit code.

    ``received`` are the stop signals of this process, to which its handlers append.
    """
    # What the agent logs repeats what the run itself reports.
    logger = logging.getLogger("torch.distributed")
    logger.propagate = False
    logger.handlers = [logging.NullHandler()]
    os.environ[_HANDLED_BY_TORCH] = ""
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint="localhost:0",
        run_id=str(uuid.uuid4()),
        min_nodes=1,
        max_nodes=1,
        timeout=_RENDEZVOUS_SECONDS,
    )
    rendezvous = get_rendezvous_handler(parameters)
    program, *words = line.worker_words
    spec = WorkerSpec(
        role="default",
        local_world_size=line.nproc,
        rdzv_handler=rendezvous,
        entrypoint=program,
        args=tuple(words),
        max_restarts=0,
    )
    if received:
        return report_early_interrupt(received[0])
    redirects = dict.fromkeys(line.redirected_ranks, Std.ALL)
    logs = DefaultLogsSpecs(str(line.paths.torchrun_logs), redirects=redirects)
    try:
        failures = _Agent(spec, logs, received).run().failures
    finally:
        rendezvous.shutdown()
    if not failures:
        return 0
    rank, first = min(failures.items(), key=_failed_at)
    # A refusal that all ranks share was printed by rank 0, whichever of them ended first.
    seen = [str(given) for given in range(line.nproc) if given not in redirects]
    is_seen = rank not in redirects or any(_has_reported(first, other) for other in seen)
    # A process that is interrupted ends with 130, and one that does not listen yet by the signal itself.
    if first.exitcode in (_INTERRUPTED, -signal.SIGINT) or len(received) > 1 or (received and first.exitcode < 0):
        print(f"\n{describe_interrupt(line.paths)}", file=sys.stderr)
        return _SIGNAL_EXIT_CODE + (received[0] if received else signal.SIGINT)
    return _conclude(line, rank, first, is_seen=is_seen)


def _has_reported(failure: ProcessFailure, rank: str) -> bool:
    """Return whether another rank has left the same message as one that failed."""
    own = Path(failure.error_file)
    other = own.parent.parent / rank / own.name
    with contextlib.suppress(OSError, ValueError):
        own_message, message = (json.loads(file.read_text())["message"]["message"] for file in (own, other))
        return bool(own_message == message)
    return False


def _failed_at(failure: tuple[int, ProcessFailure]) -> int:
    return failure[1].timestamp


def _conclude(line: TrainingLine, rank: int, failure: ProcessFailure, *, is_seen: bool) -> int:
    """Report a failure that no process has reported on this terminal, and return the exit code."""
    has_message = Path(failure.error_file).exists()
    if has_message and os.environ.get("TORCHELASTIC_ERROR_FILE"):
        get_error_handler().dump_error_file(failure.error_file, failure.exitcode)
    # A process that ends by an error of its own says so; here it is repeated if its output went to a file.
    if failure.exitcode > 0:
        message = failure.message
        text = message.get("message", "") if isinstance(message, dict) else str(message)
        if not has_message and not is_seen:
            print(
                f"\nrank {rank} ended with exit code {failure.exitcode}.{how_to_continue(line.paths)}", file=sys.stderr
            )
        elif not is_seen:
            print(f"\nrank {rank} failed:\n{text.rstrip()}", file=sys.stderr)
        return failure.exitcode
    number = -failure.exitcode
    cause = " The system may have run out of memory." if number == signal.SIGKILL else ""
    ended = f"rank {rank} was ended by {signal.Signals(number).name}.{cause}"
    print(f"\n{ended}{how_to_continue(line.paths)}", file=sys.stderr)
    return _SIGNAL_EXIT_CODE + number
