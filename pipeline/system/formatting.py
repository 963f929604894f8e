"""Values as text: numbers, tables, terminal lines, and values that JSON can hold."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

# A value that was parsed from JSON or is about to be written as JSON.
Json = Any
_BARS = "▁▂▃▄▅▆▇█"
_COLUMN_GAP = "  "


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
        f"{value} on {'rank' if len(holders) == 1 else 'ranks'} {', '.join(holders)}"
        for value, holders in ranks.items()
    )


def shown_fact(value: object) -> str:
    """Return a fact about a machine: flags as in JSON, and "none" for what is empty or missing."""
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value in (None, "") else str(value)


def shown_duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def shown_value(value: float | None) -> str:
    """Return a loss with four decimals; None stands for NaN, which JSON cannot hold."""
    return "nan" if value is None else f"{value:.4f}"


def shown_values(values: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name}: {shown_value(value)}" for name, value in values.items())


def sparkline(values: Sequence[float], width: int = 20) -> str:
    """Return the latest values as bars, scaled from the lowest to the highest; a value that is not finite is blank."""
    latest = values[-width:]
    finite = [value for value in latest if math.isfinite(value)]
    low = min(finite, default=0.0)
    extent = max(finite, default=0.0) - low
    bars = []
    for value in latest:
        if not math.isfinite(value):
            bars.append(" ")
            continue
        # A constant curve has no extent; draw it at half height.
        height = (value - low) / extent if extent else 0.5
        bars.append(_BARS[round(height * (len(_BARS) - 1))])
    return "".join(bars)


def as_json(value: Json) -> Json:
    """Return a copy for JSON: NaN and infinities, which JSON lacks, become null; a complex number becomes a pair."""
    if isinstance(value, dict):
        return {key: as_json(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [as_json(inner) for inner in value]
    if isinstance(value, complex):
        return as_json([value.real, value.imag])
    return None if isinstance(value, float) and not math.isfinite(value) else value


def flat(value: Json, prefix: str = "") -> Iterator[tuple[str, Json]]:
    """Yield every value of nested objects by its dotted name; a list or an empty object is one value."""
    if not isinstance(value, dict) or not value:
        yield prefix, value
        return
    for key, inner in value.items():
        yield from flat(inner, f"{prefix}.{key}" if prefix else str(key))


def shown_parameters(parameters: Mapping[str, Json]) -> str:
    """Return every parameter by its dotted name, as it would be written in JSON."""
    return ", ".join(
        f"{name} {value if isinstance(value, str) else json.dumps(value)}" for name, value in flat(dict(parameters))
    )


def width() -> int | None:
    """Return the number of columns of the terminal; None if the output does not go to one."""
    # COLUMNS asks for a width also where the output is piped.
    if sys.stdout.isatty() or os.environ.get("COLUMNS"):
        return shutil.get_terminal_size().columns
    return None


def clipped(line: str) -> str:
    """Return a line cut to the terminal, so that it does not wrap; whole if it goes to a pipe or file."""
    columns = width()
    return line if columns is None or len(line) <= columns else line[: columns - 1] + "…"


def folded(line: str, indent: int = 2) -> str:
    """Return a line folded between words at the width of the terminal; whole if it goes to a pipe or file."""
    columns = width()
    if columns is None:
        return line
    # A path or a name that is too long stays whole, so that it can be copied.
    return textwrap.fill(line, columns, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield aligned lines; the first row is the header. Columns that do not fit follow below, as a second table."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    limit = width()
    # Every part of a wide table begins with the first column, which names the rows.
    parts = [[0]]
    for column in range(1, len(widths)):
        num_used = sum(widths[shown] + len(_COLUMN_GAP) for shown in parts[-1]) + widths[column]
        # A part has at least one column besides the first, even if that is too wide: it is clipped below.
        if limit is not None and num_used > limit and len(parts[-1]) > 1:
            parts.append([0])
        parts[-1].append(column)
    for number, columns in enumerate(parts):
        if number:
            yield ""
        for row in rows:
            yield clipped(_COLUMN_GAP.join(row[column].ljust(widths[column]) for column in columns).rstrip())
