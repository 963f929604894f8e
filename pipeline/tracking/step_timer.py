"""How fast a run goes: of the latest steps, and of the running epoch."""

from __future__ import annotations

import time
from typing import Any

_MEMORY_OF_THE_PAST = 0.9


class Pace:
    """Step times as a moving average, and sums since the epoch, or this start's part of it, began."""

    def __init__(self) -> None:
        self.step_seconds: float | None = None
        self.begin_epoch(0)

    def begin_epoch(self, step: int) -> None:
        """Forget the sums; ``step`` is the number of the epoch's steps that are done already."""
        self._began = time.monotonic()
        self._first_step = step + 1
        self._last_step = step
        self._data_seconds = 0.0

    def add(self, step: int, seconds: float, data_seconds: float) -> None:
        known = seconds if self.step_seconds is None else self.step_seconds
        self.step_seconds = _MEMORY_OF_THE_PAST * known + (1 - _MEMORY_OF_THE_PAST) * seconds
        self._last_step = step
        self._data_seconds += data_seconds

    def seconds_for(self, num_steps: int) -> float:
        return num_steps * (self.step_seconds or 0.0)

    def epoch(self) -> dict[str, Any]:
        """Return what the epoch took so far, for the journal."""
        return {
            "seconds": round(time.monotonic() - self._began, 3),
            "data_seconds": round(self._data_seconds, 3),
            "steps": [self._first_step, self._last_step],
        }
