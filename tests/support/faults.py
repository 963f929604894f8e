"""A disk that fails or dies at a chosen operation."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

from pipeline.runtime.durable import Disk

Result = TypeVar("Result")


class Killed(BaseException):
    """The process is gone: nothing may catch this and go on writing."""


class CountingDisk(Disk):
    """Counts operations, so that a campaign knows how many there are to put a fault at."""

    def __init__(self) -> None:
        self.operations: list[tuple[str, Path]] = []

    def perform(self, operation: str, path: Path, action: Callable[[], Result]) -> Result:
        self.operations.append((operation, path))
        return super().perform(operation, path, action)


class KillingDisk(CountingDisk):
    """Dies at the n-th operation: before it, after it, or in the middle of what it writes."""

    def __init__(self, kill_at: int, moment: str) -> None:
        super().__init__()
        self._kill_at, self._moment, self._is_dead = kill_at, moment, False

    def perform(self, operation: str, path: Path, action: Callable[[], Result]) -> Result:
        if self._is_dead:
            raise Killed
        if len(self.operations) + 1 < self._kill_at:
            return super().perform(operation, path, action)
        self._is_dead = True
        if self._moment != "before":
            super().perform(operation, path, action)
        if self._moment == "torn" and operation == "write":
            os.truncate(path, path.stat().st_size // 2)
        raise Killed


class FailingDisk(CountingDisk):
    """Refuses the n-th operation, and all that follow if asked to, with an error of the operating system."""

    def __init__(self, fail_at: int, code: int = errno.ENOSPC, *, for_ever: bool = False) -> None:
        super().__init__()
        self._fail_at, self._code, self._for_ever = fail_at, code, for_ever

    def perform(self, operation: str, path: Path, action: Callable[[], Result]) -> Result:
        number = len(self.operations) + 1
        is_hit = number == self._fail_at or (self._for_ever and number > self._fail_at)
        return super().perform(operation, path, self._refuse if is_hit else action)

    def _refuse(self) -> NoReturn:
        raise OSError(self._code, os.strerror(self._code))
