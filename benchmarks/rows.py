"""Rows of the table: a ratio for each contender, with the spread of its rounds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.driver import AGAIN, EXACT, PEERS, PIPELINE
from benchmarks.turns import FUSED

_COLUMNS = {PIPELINE: "ours", EXACT: "ours, exact", AGAIN: "by hand again", FUSED: "by hand, fused"}


@dataclass(frozen=True)
class Spread:
    """The median of some rounds and the middle half of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        seen = sorted(values)
        low, median, high = statistics.quantiles(seen, n=4, method="inclusive") if len(seen) > 1 else seen * 3
        return cls(median, low, high)

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f})"


@dataclass(frozen=True)
class Row:
    """One measure: what it is, what we want, and what each contender reached."""

    label: str
    goal: str
    cells: Mapping[str, Spread | str]
    facts: Mapping[str, object] = field(default_factory=dict)


def ratios(of: Sequence[float], to: Sequence[float]) -> Spread:
    """Return one contender's values in units of another's, round by round."""
    return Spread.of(one / other for one, other in zip(of, to, strict=True))


def as_text(rows: Sequence[Row]) -> str:
    """Return the rows as a table that is also Markdown."""
    columns = _COLUMNS | {name: name for name in PEERS}
    header = ["measure", "goal", *columns.values()]
    lines = [[row.label, row.goal, *(str(row.cells.get(name, "")) for name in columns)] for row in rows]
    widths = [max(len(line[column]) for line in [header, *lines]) for column in range(len(header))]
    bars = [["-" * width for width in widths]]
    return "\n".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |"
        for line in [header, *bars, *lines]
    )
