"""The progress bar of a loop, on a terminal only."""

from __future__ import annotations

import contextlib
import sys
from types import TracebackType
from typing import Any

from tqdm import tqdm

from pipeline.system.logging import LOGGER


class ProgressBar:
    """Shows how far a loop has come; a terminal that goes away never stops the loop."""

    def __init__(self, title: str, total: int, done: int, updates: int, *, enabled: bool) -> None:
        self._every = max(1, total // updates)
        self._total = total
        self._done = done
        self._bar: Any = None
        if enabled and sys.stderr.isatty():
            self._do(lambda _: self._open(title))

    def _open(self, title: str) -> None:
        # How often it is drawn is decided here, not by tqdm.
        own_pace: Any = {"miniters": 1, "mininterval": 0}
        self._bar = tqdm(total=self._total, initial=self._done, desc=title, leave=False, dynamic_ncols=True, **own_pace)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._do(lambda bar: bar.close())

    def advance(self, text: str = "") -> None:
        """Count one more round; the bar is drawn a limited number of times per loop."""
        self._done += 1
        if self._bar is not None and (self._done % self._every == 0 or self._done == self._total):
            self._do(lambda bar: (bar.set_postfix_str(text, refresh=False), bar.update(self._done - bar.n)))

    def _do(self, action: Any) -> None:
        try:
            action(self._bar)
        except (OSError, ValueError) as error:
            _release_lock()
            if self._bar is not None:
                self._bar.disable = True
            self._bar = None
            LOGGER.warning("The progress bar is gone: %s. Training continues.", error)


def _release_lock() -> None:
    """Give back what tqdm keeps when it could not draw: other threads write their lines under the same lock."""
    with contextlib.suppress(RuntimeError, AssertionError):
        while True:
            tqdm.get_lock().release()  # type: ignore[no-untyped-call]
