"""Values from JSON files that any program may have written: a value that does not fit its meaning is None."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeline.progress import Progress


def as_text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def as_int(value: object) -> int | None:
    # True is an int as well, but never a count.
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def as_number(value: object) -> float | None:
    """Return a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        # JSON has integers of any length, of which a float cannot hold all.
        return None


def as_progress(value: object) -> Progress | None:
    try:
        return Progress.from_json(value) if isinstance(value, dict) else None
    except (KeyError, TypeError, ValueError):
        return None


def as_losses(value: object) -> dict[str, float | None] | None:
    """Return values by register; null is the NaN that JSON cannot hold."""
    is_losses = isinstance(value, dict) and all(loss is None or isinstance(loss, float) for loss in value.values())
    return dict(value) if isinstance(value, dict) and is_losses else None


@dataclass(frozen=True)
class BestEpoch:
    """The epoch with the best validation so far, and the value of each register there."""

    epoch: int
    values: dict[str, float | None]

    @classmethod
    def from_json(cls, value: object) -> BestEpoch | None:
        if not isinstance(value, dict):
            return None
        epoch = as_int(value.get("epoch"))
        values = as_losses(value.get("values"))
        return None if epoch is None or values is None else cls(epoch, values)
