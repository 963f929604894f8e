"""The progress bar of a loop, on a terminal only."""

from __future__ import annotations

import contextlib
import os
import pdb
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import NoReturn

from tqdm import tqdm

from pipeline.system.logging import LOGGER

# Short at 80 columns: the losses matter more than a wide bar.
_FORMAT = "{desc} {percentage:3.0f}% |{bar:8}| {n_fmt}/{total_fmt} {elapsed}<{remaining}, {rate_fmt}{postfix}"


class ProgressBar:
    """Shows how far a loop has come; a terminal that goes away never stops the loop."""

    def __init__(self, title: str, total: int, done: int, updates: int, *, enabled: bool) -> None:
        self._every = max(1, total // updates)
        self._total = total
        self._done = done
        self._bar: tqdm[NoReturn] | None = None
        if enabled and sys.stderr.isatty():
            with self._survive_terminal():
                # How often it is drawn is decided here, so tqdm's own limits are switched off.
                self._bar = tqdm(
                    total=total,
                    initial=done,
                    desc=title,
                    leave=False,
                    dynamic_ncols=True,
                    bar_format=_FORMAT if total else None,
                    miniters=1,
                    mininterval=0,
                )

    def __enter__(self) -> ProgressBar:
        # breakpoint() in an author's code: the prompt must not stand behind half a bar.
        self._breakpoint = sys.breakpointhook
        if self._bar is not None:
            sys.breakpointhook = self._clear_and_break
        return self

    def _clear_and_break(self, *arguments: object, **options: object) -> object:
        if self._bar is not None:
            with self._survive_terminal():
                self._bar.clear()
        is_pdb = self._breakpoint is sys.__breakpointhook__ and "PYTHONBREAKPOINT" not in os.environ
        if not is_pdb:
            return self._breakpoint(*arguments, **options)
        # In the author's frame: pdb.set_trace would stop in this one.
        pdb.Pdb().set_trace(sys._getframe().f_back)
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.breakpointhook = self._breakpoint
        if self._bar is not None:
            with self._survive_terminal():
                self._bar.close()

    def advance(self, text: str = "") -> None:
        """Count one more round; the bar is drawn a limited number of times per loop."""
        self._done += 1
        if self._bar is not None and (self._done % self._every == 0 or self._done == self._total):
            with self._survive_terminal():
                self._bar.set_postfix_str(text, refresh=False)
                self._bar.update(self._done - self._bar.n)

    @contextlib.contextmanager
    def _survive_terminal(self) -> Iterator[None]:
        """Draw; if the terminal is gone, continue without a bar."""
        try:
            yield
        except (OSError, ValueError) as error:
            # tqdm still holds its lock if it could not draw, and other threads write their lines under the same lock.
            # It can be held several times over, so it is released until it refuses.
            with contextlib.suppress(RuntimeError, AssertionError):
                while True:
                    tqdm.get_lock().release()  # type: ignore[no-untyped-call]
            if self._bar is not None:
                # Otherwise tqdm would try to draw once more when the bar is deleted.
                self._bar.disable = True
            self._bar = None
            LOGGER.warning("The progress bar is gone: %s. Training continues.", error)
