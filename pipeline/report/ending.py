"""The end of a run, however it comes: everything closed, a failure noted, the page written."""

from __future__ import annotations

import bdb
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipeline.experiment.pymodules.user_code import author_frames
from pipeline.monitoring.journal import END, Journal
from pipeline.paths import ExperimentPaths
from pipeline.report.page import leave_report
from pipeline.system.logging import LOGGER


@contextmanager
def conclude_run(paths: ExperimentPaths, journal: Journal, close: Callable[[], None]) -> Iterator[None]:
    """Close what a run has opened; every rank notes a failure, and rank zero writes a page about it."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__.startswith("pipeline."):
            # Our own errors are sentences.
            text = str(error)
        else:
            # The frames of the experiment's own code say more than those of the pipeline around them.
            text = author_frames(error) or "".join(traceback.format_exception_only(type(error), error))
        # Before closing, which may fail as well.
        if isinstance(error, bdb.BdbQuit):
            journal.note(END, outcome="stopped", reason="the debugger was left")
        elif isinstance(error, KeyboardInterrupt):
            journal.note(END, outcome="stopped", reason="interrupted at once")
        else:
            journal.note(END, outcome="failed", error=text)
        close()
        # After an interrupt, end at once.
        if journal.rank == 0 and isinstance(error, Exception):
            page = leave_report(paths)
            if page is not None:
                LOGGER.info("report: %s", page)
        raise
    close()
