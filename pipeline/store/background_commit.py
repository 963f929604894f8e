"""Commits behind the loop: one at a time, in a thread, with errors that surface at the next question."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from pipeline.progress import Progress
from pipeline.store.changes import Changes
from pipeline.store.manifest import JsonObject
from pipeline.store.store import BegunCommit, ResultsStore
from pipeline.system.disk import low_priority_executor


class Commits:
    """Takes a copy of the state at once and makes it permanent while the training continues.

    ``in_background=False`` does the same work before returning. What is committed is the same.
    """

    def __init__(self, store: ResultsStore, *, in_background: bool) -> None:
        self._store = store
        self._executor = low_priority_executor("commit") if in_background else None
        self._begun: BegunCommit | None = None
        self._pending: Future[None] | None = None
        self._then: Callable[[], None] | None = None

    def begin(self, changes: Callable[[], Changes], progress: Progress, run_state: JsonObject) -> dict[str, Path]:
        """Begin a commit once the one before is complete; return the folders that all processes must fill now."""
        # Changes are made only now: they copy tensors into memory from which the commit before was being written.
        self.wait()
        self._begun = self._store.begin(changes(), progress, run_state)
        return {path: self._begun.staging / path for path in self._begun.changes.shards}

    def complete(self, then: Callable[[], None]) -> None:
        """Let what was begun become permanent; ``then`` is called by this thread once it is."""
        if self._begun is None:
            raise RuntimeError("A commit must have begun before it can be completed.")
        begun = self._begun
        self._begun = None
        self._then = then
        if self._executor is None:
            self._store.complete(begun)
            self._conclude()
        else:
            self._pending = self._executor.submit(self._store.complete, begun)

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
            # Forgotten first: an error is raised once, and the commit that failed is not waited for again.
            pending = self._pending
            self._pending = None
            pending.result()
            self._conclude()

    def _conclude(self) -> None:
        then = self._then
        self._then = None
        if then is not None:
            then()

    def close(self) -> None:
        """Let a commit that is being written come to its end, whatever that is."""
        if self._executor is not None:
            self._executor.shutdown(wait=True)
