"""Requests to stop: signals, a request file, and the death of the launcher."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from pipeline.system.files import read_regular

SECONDS_BETWEEN_LOOKS = 1.0
_SET_PARENT_DEATH_SIGNAL = 1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# Asked before anything else is imported: a launcher that dies during the imports must be missed later.
_LAUNCHER = os.getppid()


def end_with_launcher() -> None:
    """Turn the death of the launcher into a SIGTERM: it ends this process at once, unless stop requests are heard."""

    def watch() -> None:
        # A launcher that died before this process could ask for its number has left it to the machine's first process.
        while os.getppid() == _LAUNCHER and not (_LAUNCHER == 1 and not _is_python(_LAUNCHER)):
            time.sleep(SECONDS_BETWEEN_LOOKS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def _is_python(pid: int) -> bool:
    """Return whether a process runs Python, as a launcher that is a container's first process does."""
    try:
        return "python" in Path(f"/proc/{pid}/exe").readlink().name
    except OSError:
        return False


class StopRequests:
    """Knows whether this process has been asked to finish the step, commit and leave.

    Handlers only set a flag: the processes agree on the step at which they stop. A second SIGINT means now.
    """

    def __init__(self, stop_file: Path | None, *, has_launcher: bool) -> None:
        self.reason = ""
        self._stop_file = stop_file
        self._has_launcher = has_launcher
        self._looked = time.monotonic()

    def listen(self) -> None:
        for number in STOP_SIGNALS:
            # Under nohup, the process must outlive the terminal.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.reason == "SIGINT":
            raise KeyboardInterrupt
        self.reason = self._orphaned() or signal.Signals(number).name

    def _orphaned(self) -> str:
        return "the launcher is gone" if self._has_launcher and os.getppid() != _LAUNCHER else ""

    def asked(self, *, epoch_ends: bool = False) -> bool:
        """Return whether to stop; looks at the disk at most once a second."""
        now = time.monotonic()
        if not self.reason and (epoch_ends or now - self._looked >= SECONDS_BETWEEN_LOOKS):
            self._looked = now
            self.reason = self._look(epoch_ends)
        return bool(self.reason)

    def _look(self, epoch_ends: bool) -> str:
        if self._orphaned() or self._stop_file is None:
            return self._orphaned()
        try:
            wanted = read_regular(self._stop_file).strip()
        except OSError:
            return ""
        return "stop request" if epoch_ends or wanted != b"epoch" else ""


def die_with_parent() -> None:
    """For loader workers: let the kernel end this process with its parent, whatever it is waiting for then."""
    parent = multiprocessing.parent_process()
    ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    # A parent that was gone before the kernel knew sends nothing any more.
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)


def ignore_stop_signals() -> None:
    """For loader workers: the training process decides when they end."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class TimeLimit:
    """Raise ``error()`` in the main thread if the block takes longer than ``seconds``."""

    def __init__(self, seconds: float, error: Callable[[], Exception]) -> None:
        self._seconds = seconds
        self._error = error

    def __enter__(self) -> None:
        self._previous = signal.signal(signal.SIGALRM, self._expire)
        signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def __exit__(self, *exception: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._previous)

    def _expire(self, number: int, frame: FrameType | None) -> None:
        raise self._error()
