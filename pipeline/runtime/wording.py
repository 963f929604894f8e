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


def shown_number(count: int, singular: str, plural: str) -> str:
    return f"{count} {singular if count == 1 else plural}"


def shown_by_rank(values: Sequence[object]) -> str:
    """Return the value that all ranks have, or each value with its ranks."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(shown_fact(value), []).append(str(rank))
    if len(ranks) == 1:
        return next(iter(ranks))
    return " and ".join(
        f"{value} on {'rank' if len(listed) == 1 else 'ranks'} {', '.join(listed)}" for value, listed in ranks.items()
    )


def shown_fact(value: object) -> str:
    """Return a fact about a machine; what is empty or missing is none."""
    return str(value).lower() if isinstance(value, bool) else "none" if value in (None, "") else str(value)


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
