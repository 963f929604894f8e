"""Numbers as people read them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta

_BARS = "▁▂▃▄▅▆▇█"


def shown_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def shown_duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def shown_value(value: float | None) -> str:
    """Return a loss; None stands for NaN, which JSON cannot hold."""
    return "nan" if value is None else f"{value:.4f}"


def shown_values(values: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name}: {shown_value(value)}" for name, value in values.items())


def sparkline(values: Sequence[float], width: int = 20) -> str:
    """Return the latest values as small bars from the lowest to the highest; a gap is a blank."""
    shown = [value if math.isfinite(value) else None for value in values[-width:]]
    known = [value for value in shown if value is not None]
    low, extent = min(known, default=0.0), max(known, default=0.0) - min(known, default=0.0)
    heights = [None if value is None else (value - low) / extent if extent else 0.5 for value in shown]
    return "".join(" " if height is None else _BARS[round(height * (len(_BARS) - 1))] for height in heights)
