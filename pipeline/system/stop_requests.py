"""Requests to stop: signals, a request file, and the death of the launcher; and time limits for a block of code."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from pipeline.arguments import is_rank_zero
from pipeline.system.files import read_regular

SECONDS_BETWEEN_LOOKS = 1.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_LAUNCHER_IS_GONE = "the launcher is gone"
# Read when this module is imported, early in a start: a launcher that dies during the imports that follow, which take
# seconds, must be noticed as well.
_LAUNCHER = os.getppid()
_FIRST_PROCESS = 1
# PR_SET_PDEATHSIG of prctl(2).
_SET_PARENT_DEATH_SIGNAL = 1


def end_with_launcher() -> None:
    """Send this process a SIGTERM when its launcher dies.

    Before ``StopRequests.listen`` that ends the process at once; afterwards it is a request to stop.
    """

    def watch() -> None:
        # The kernel gives an orphan to process 1. If that is the "launcher", the real one died before this process
        # asked for its parent, unless the launcher is the first process of a container: only that one runs Python.
        while os.getppid() == _LAUNCHER and (_LAUNCHER != _FIRST_PROCESS or _is_python(_FIRST_PROCESS)):
            time.sleep(SECONDS_BETWEEN_LOOKS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def _is_python(pid: int) -> bool:
    try:
        return "python" in Path(f"/proc/{pid}/exe").readlink().name
    except OSError:
        return False


class StopRequests:
    """Whether this process was asked to finish its step, commit and exit; ``reason`` says by what.

    A signal only sets a flag, because all ranks must stop at the same step. A second SIGINT interrupts at once.
    """

    def __init__(self, stop_file: Path | None, *, has_launcher: bool) -> None:
        self.reason = ""
        self._stop_file = stop_file
        self._has_launcher = has_launcher
        self._last_look = time.monotonic()

    def listen(self) -> None:
        """From now on, treat the stop signals as requests."""
        for number in STOP_SIGNALS:
            # nohup has SIGHUP ignored, so that the process outlives its terminal.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.reason == "SIGINT":
            raise KeyboardInterrupt
        # ``end_with_launcher`` sends SIGTERM when the launcher dies: name the cause, not the signal.
        self.reason = _LAUNCHER_IS_GONE if self._is_orphan() else signal.Signals(number).name

    def _is_orphan(self) -> bool:
        # Without a launcher the parent may end: a run in the background survives the shell that started it.
        return self._has_launcher and os.getppid() != _LAUNCHER

    def asked(self, *, epoch_ends: bool = False) -> bool:
        """Return whether to stop; reads the stop file at most once a second, and when an epoch ends."""
        now = time.monotonic()
        if self.reason or not (epoch_ends or now - self._last_look >= SECONDS_BETWEEN_LOOKS):
            return bool(self.reason)
        self._last_look = now
        if self._is_orphan():
            self.reason = _LAUNCHER_IS_GONE
        elif self._stop_file is not None:
            # The file usually does not exist. It may also be a folder or a pipe that someone has put there.
            with contextlib.suppress(OSError):
                content = read_regular(self._stop_file).strip()
                # Any other content means "after this step", as an empty file does.
                if epoch_ends or content != b"epoch":
                    self.reason = "stop request"
        return bool(self.reason)


@contextlib.contextmanager
def stop_signals_collected() -> Iterator[list[int]]:
    """In this block, collect the stop signals of this process in a list instead of ending at them."""
    received: list[int] = []
    # nohup has SIGHUP ignored, so that the process outlives its terminal.
    numbers = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    handlers = {number: signal.signal(number, lambda number, _: received.append(number)) for number in numbers}
    # A program that was replaced by this one may have let Ctrl+C wait.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def report_early_interrupt(number: int) -> int:
    """Say that a signal came before anything was started, and return the exit code for it."""
    if is_rank_zero():
        print("\nInterrupted before anything was started.", file=sys.stderr, flush=True)
    return 128 + number


def die_with_parent() -> None:
    """For loader workers: let the kernel kill this process when its parent ends."""
    parent = multiprocessing.parent_process()
    # Not a thread that watches the parent: the kernel also ends a worker that hangs in C code.
    ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    # If the parent ended before the call above, the kernel sends nothing.
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)


def ignore_stop_signals() -> None:
    """For loader workers: leave stop signals to the training process."""
    # Ctrl+C reaches all processes of a terminal, and the step in progress still needs its batches.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class TimeLimit:
    """Raise ``error()`` in the main thread if the block takes longer than ``seconds``; not to be nested."""

    def __init__(self, seconds: float, error: Callable[[], Exception]) -> None:
        self._seconds = seconds
        self._error = error

    def __enter__(self) -> None:
        self._previous = signal.signal(signal.SIGALRM, self._expire)
        signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def __exit__(self, *exception: object) -> None:
        # The timer first: it must not fire into the previous handler.
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._previous)

    def _expire(self, number: int, frame: FrameType | None) -> None:
        raise self._error()
