"""Commits behind the loop: one at a time, in a thread, with errors that surface at the next question."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pipeline.progress import Progress
from pipeline.results.store import ResultsStore
from pipeline.runtime.durable import Changes


class Commits:
    """Takes a copy of the state at once and makes it permanent while the training goes on.

    ``in_background=False`` does the same work before returning. What is committed is the same.
    """

    def __init__(self, store: ResultsStore, *, in_background: bool) -> None:
        self._store = store
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="commit") if in_background else None
        self._pending: Future[None] | None = None
        self._then: Callable[[], None] = _nothing

    def submit(
        self,
        changes: Callable[[], Changes],
        progress: Progress,
        run_state: dict[str, Any],
        then: Callable[[], None],
    ) -> None:
        """Begin a commit once the one before is complete; ``then`` is called here, in this thread, once it is too."""
        self.wait()
        rest = self._store.begin(changes(), progress, run_state)
        self._then = then
        if self._executor is None:
            rest()
            self._conclude()
        else:
            self._pending = self._executor.submit(rest)

    def poll(self) -> None:
        """Raise what went wrong since the last question, if anything did."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Return when nothing is being written any more."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()
            self._conclude()

    def _conclude(self) -> None:
        then, self._then = self._then, _nothing
        then()

    def close(self) -> None:
        """Let a commit that is being written come to its end, whatever that is."""
        if self._executor is not None:
            self._executor.shutdown(wait=True)


def _nothing() -> None:
    """What follows when nothing was asked for."""
