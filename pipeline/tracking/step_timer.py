"""How fast a run goes: of the latest steps, and of the running epoch."""

from __future__ import annotations

import time

# The weight of the past in the moving average of step times.
_SMOOTHING = 0.9


class Pace:
    """Step times as a moving average, and sums since the epoch, or this start's part of it, began."""

    def __init__(self) -> None:
        self.step_seconds: float | None = None
        self.begin_epoch(0)

    def begin_epoch(self, step: int) -> None:
        """Reset the sums; ``step`` is the number of the epoch's steps that are done already."""
        # The average stays: steps of the next epoch take as long as those of this one.
        self._began = time.monotonic()
        self._first_step = step + 1
        self._last_step = step
        self._data_seconds = 0.0

    def add(self, step: int, seconds: float, data_seconds: float) -> None:
        """Take one more step into account, of which loading took ``data_seconds``."""
        average = seconds if self.step_seconds is None else self.step_seconds
        self.step_seconds = _SMOOTHING * average + (1 - _SMOOTHING) * seconds
        self._last_step = step
        self._data_seconds += data_seconds

    def seconds_for(self, num_steps: int) -> float:
        """Return how long so many steps will take."""
        return num_steps * (self.step_seconds or 0.0)

    def epoch(self) -> dict[str, float | list[int]]:
        """Return what the epoch took so far, for the journal."""
        return {
            "seconds": round(time.monotonic() - self._began, 3),
            "data_seconds": round(self._data_seconds, 3),
            "steps": [self._first_step, self._last_step],
        }
