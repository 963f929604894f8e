"""Numbers as people read them."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

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
    low = min(known, default=0.0)
    extent = max(known, default=0.0) - min(known, default=0.0)
    heights = [None if value is None else (value - low) / extent if extent else 0.5 for value in shown]
    return "".join(" " if height is None else _BARS[round(height * (len(_BARS) - 1))] for height in heights)


def as_json(value: Any) -> Any:
    """Return a value in which whatever JSON has no word for is null; a complex number is a pair."""
    if isinstance(value, dict):
        return {key: as_json(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [as_json(inner) for inner in value]
    if isinstance(value, complex):
        return as_json([value.real, value.imag])
    return None if isinstance(value, float) and not math.isfinite(value) else value


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value by its dotted name; a list is one value, and so is an empty object."""
    if not isinstance(value, dict) or not value:
        yield prefix, value
        return
    for key, inner in value.items():
        yield from flat(inner, f"{prefix}.{key}" if prefix else str(key))


_GAP = "  "


def width() -> int | None:
    """Return the columns of the terminal, or None where output is not read on one."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS"):
        return shutil.get_terminal_size().columns
    return None


def clipped(line: str) -> str:
    """Return a line that does not wrap."""
    columns = width()
    return line if columns is None or len(line) <= columns else line[: columns - 1] + "…"


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield aligned lines; the first row is the header, and columns that do not fit follow below the others."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for number, columns in enumerate(_folded(widths)):
        if number:
            yield ""
        for row in rows:
            yield clipped(_GAP.join(row[column].ljust(widths[column]) for column in columns).rstrip())


def _folded(widths: list[int]) -> Iterator[list[int]]:
    """Yield which columns stand side by side; the first, which names the rows, is repeated."""
    limit = width()
    columns = [0]
    for column in range(1, len(widths)):
        taken = sum(widths[one] + len(_GAP) for one in columns) + widths[column]
        if limit is not None and taken > limit and len(columns) > 1:
            yield columns
            columns = [0]
        columns.append(column)
    yield columns
