"""Destinations of log messages: terminal and log file for rank 0; the other ranks only log warnings and errors."""

from __future__ import annotations

import contextlib
import errno
import logging
import sys
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

LOGGER = logging.getLogger("pipeline")
# An attribute of records, and the kinds of handlers it may exclude.
_NOT_FOR = "not_for"
_TERMINALS = "terminals"
_OTHERS = "others"


def start_console(experiment: str, *, is_rank_zero: bool, stream: TextIO | None = None) -> None:
    """Send messages to the terminal: to standard output, or to ``stream`` if a verb prints its result there."""
    # With this off, logging ignores errors of its handlers: a closed terminal or a full disk must not stop a training.
    logging.raiseExceptions = False
    LOGGER.setLevel(logging.INFO if is_rank_zero else logging.WARNING)
    LOGGER.propagate = False
    LOGGER.handlers.clear()
    stream = stream or sys.stdout
    is_terminal = _is_terminal(stream)
    handler = _AboveBars(stream)
    if is_terminal:
        # Date and name are in the log file; here they would take half of a line.
        handler.setFormatter(_TerminalFormatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    else:
        handler.setFormatter(_line_format(experiment))
    _add(handler, is_terminal=is_terminal)


def _is_terminal(stream: TextIO | None) -> bool:
    """Return whether a person reads a stream; Python has none for an output that was closed from the start."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def log_detail(message: str) -> None:
    """Write a line that a terminal need not show: what comes every few steps."""
    LOGGER.info(message, extra={_NOT_FOR: _TERMINALS})


def log_on_terminal(message: str) -> None:
    """Write a line for a person at a terminal, which sums up what the details say."""
    LOGGER.info(message, extra={_NOT_FOR: _OTHERS})


def start_file(experiment: str, path: Path) -> None:
    """Also append messages to the experiment's log file; if it cannot be written, log a warning and continue."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_fifo():
            # Opening a pipe would wait for a reader.
            raise OSError(errno.EINVAL, "Is a pipe", str(path))
        handler = logging.FileHandler(path, encoding="utf-8")
        handler.setFormatter(_line_format(experiment))
        _add(handler, is_terminal=False)
    except OSError as error:
        LOGGER.warning("No log file: %s. Training continues without it.", error)


def stop_logging() -> None:
    # A copy of the list, because removeHandler changes it.
    for handler in list(LOGGER.handlers):
        LOGGER.removeHandler(handler)
        # Closing flushes what a full disk did not take before, and fails again.
        with contextlib.suppress(OSError):
            handler.close()


def log_file_only(message: str) -> None:
    """Write a long message, such as a traceback, to the log file and not to the terminal."""
    for handler in LOGGER.handlers:
        # Directly to the handler: the logger would send it to all of them.
        if isinstance(handler, logging.FileHandler):
            handler.emit(LOGGER.makeRecord(LOGGER.name, logging.ERROR, "", 0, message, (), None))


class _AboveBars(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes lines above a tqdm progress bar; a plain handler would write into the bar."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=self.stream)
            self.flush()
        # Python raises ValueError for a stream that is closed.
        except (OSError, ValueError):
            self.handleError(record)


class _TerminalFormatter(logging.Formatter):
    """Names the level of warnings and errors only."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno < logging.WARNING else f"{record.levelname}: {text}"


def _line_format(experiment: str) -> logging.Formatter:
    return logging.Formatter(f"%(asctime)s - {experiment} - %(levelname)s - %(message)s")


def _add(handler: logging.Handler, *, is_terminal: bool) -> None:
    own_kind = _TERMINALS if is_terminal else _OTHERS

    def is_wanted(record: logging.LogRecord) -> bool:
        return getattr(record, _NOT_FOR, None) != own_kind

    handler.addFilter(is_wanted)
    LOGGER.addHandler(handler)
