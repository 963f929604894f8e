"""Commits behind the loop: one at a time, in a thread, with errors that surface at the next question."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from pipeline.progress import Progress
from pipeline.store.changes import Changes
from pipeline.store.store import ResultsStore
from pipeline.system.disk import low_priority_executor


class Commits:
    """Takes a copy of the state at once and makes it permanent while the training continues.

    ``in_background=False`` does the same work before returning. What is committed is the same.
    """

    def __init__(self, store: ResultsStore, *, in_background: bool) -> None:
        self._store = store
        self._executor = low_priority_executor("commit") if in_background else None
        self._pending: Future[None] | None = None
        self._rest: Callable[[], None] = _nothing
        self._then: Callable[[], None] = _nothing

    def begin(self, changes: Callable[[], Changes], progress: Progress, run_state: dict[str, Any]) -> dict[str, Path]:
        """Begin a commit once the one before is complete; return the folders that all processes must fill now."""
        self.wait()
        made = changes()
        self._rest = self._store.begin(made, progress, run_state)
        return {path: self._store.staging / path for path in made.shards}

    def complete(self, then: Callable[[], None]) -> None:
        """Let what was begun become permanent; ``then`` is called by this thread once it is."""
        rest = self._rest
        self._rest = _nothing
        self._then = then
        if self._executor is None:
            rest()
            self._conclude()
        else:
            self._pending = self._executor.submit(rest)

    @property
    def is_busy(self) -> bool:
        """Return whether something is being written."""
        return self._pending is not None and not self._pending.done()

    def poll(self) -> None:
        """Raise what went wrong since the last question, if anything did."""
        if not self.is_busy:
            self.wait()

    def wait(self) -> None:
        """Return when nothing is being written any more."""
        if self._pending is not None:
            pending = self._pending
            self._pending = None
            pending.result()
            self._conclude()

    def _conclude(self) -> None:
        then = self._then
        self._then = _nothing
        then()

    def close(self) -> None:
        """Let a commit that is being written come to its end, whatever that is."""
        if self._executor is not None:
            self._executor.shutdown(wait=True)


def _nothing() -> None:
    """What follows when nothing was asked for."""
