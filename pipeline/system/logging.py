"""Where messages go: rank zero speaks to the terminal and the log file, other ranks only of trouble."""

from __future__ import annotations

import contextlib
import errno
import logging
import sys
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

LOGGER = logging.getLogger("pipeline")


def start_console(experiment: str, *, is_rank_zero: bool, stream: TextIO | None = None) -> None:
    """Send messages to the terminal: to its standard output, unless that is for something else."""
    # A closed terminal or a full disk under the logs must never stop the training.
    logging.raiseExceptions = False
    LOGGER.setLevel(logging.INFO if is_rank_zero else logging.WARNING)
    LOGGER.propagate = False
    LOGGER.handlers.clear()
    _add(_AboveBars(stream or sys.stdout), experiment)


def start_file(experiment: str, path: Path) -> None:
    """Append messages to the experiment's log file as well, if it can be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_fifo():
            # Opening it would wait for a reader.
            raise OSError(errno.EINVAL, "Is a pipe", str(path))
        _add(logging.FileHandler(path, encoding="utf-8"), experiment)
    except OSError as error:
        LOGGER.warning("No log file: %s. Training continues without it.", error)


def stop_logging() -> None:
    for handler in list(LOGGER.handlers):
        LOGGER.removeHandler(handler)
        # What a full disk did not take is still buffered, and closing tries to write it once more.
        with contextlib.suppress(OSError):
            handler.close()


def log_file_only(message: str) -> None:
    """Write to the log file what the terminal should not be filled with."""
    for handler in LOGGER.handlers:
        if isinstance(handler, logging.FileHandler):
            handler.emit(LOGGER.makeRecord(LOGGER.name, logging.ERROR, "", 0, message, (), None))


class _AboveBars(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes lines above a progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=self.stream)
            self.flush()
        except (OSError, ValueError):
            self.handleError(record)


def _add(handler: logging.Handler, experiment: str) -> None:
    handler.setFormatter(logging.Formatter(f"%(asctime)s - {experiment} - %(levelname)s - %(message)s"))
    LOGGER.addHandler(handler)
