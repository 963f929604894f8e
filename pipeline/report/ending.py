"""The end of a run, however it comes: everything closed, a failure noted, the page written."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.experiment.pymodules.user_code import author_frames
from pipeline.monitoring.journal import END, Journal
from pipeline.paths import ExperimentPaths
from pipeline.report.page import leave_report
from pipeline.system.logging import LOGGER


@contextmanager
def reported(paths: ExperimentPaths, journal: Journal, close: Callable[[], None]) -> Iterator[None]:
    """Close what a run has opened; one that fails is noted by every rank, and rank zero leaves a page about it."""
    try:
        yield
    except BaseException as error:
        journal.note(END, outcome="failed", error=_told(error))
        close()
        # After an interrupt, end at once.
        if journal.rank == 0 and isinstance(error, Exception):
            _name(leave_report(paths))
        raise
    close()


def _name(page: Path | None) -> None:
    if page is not None:
        LOGGER.info("report: %s", page)


def _told(error: BaseException) -> str:
    """Return what a journal should say of an error: the author's own frames if there are any."""
    return author_frames(error) or "".join(traceback.format_exception_only(type(error), error))
