"""What fits on a terminal: clipped lines and folded tables, without colour or control characters."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence

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
    limit, columns = width(), [0]
    for column in range(1, len(widths)):
        taken = sum(widths[one] + len(_GAP) for one in columns) + widths[column]
        if limit is not None and taken > limit and len(columns) > 1:
            yield columns
            columns = [0]
        columns.append(column)
    yield columns
