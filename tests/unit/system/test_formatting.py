"""Values as text: numbers, bars, and what fits on a terminal."""

from __future__ import annotations

import math

import pytest

from pipeline.system.formatting import (
    clipped,
    shown_by_rank,
    shown_bytes,
    shown_fact,
    shown_number,
    shown_value,
    sparkline,
    table,
)

ROWS = [("", "first", "second", "third"), ("a long name", "1", "2", "3")]


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e12, "2.5 TB")])
def test_sizes_have_units(count: float, text: str) -> None:
    """Sizes have the unit that keeps them short."""
    assert shown_bytes(count) == text


def test_one_of_a_thing_is_singular() -> None:
    """Any other number is plural."""
    assert [shown_number(count, "process", "processes") for count in (1, 2)] == ["1 process", "2 processes"]


def test_unequal_values_are_listed_with_their_ranks() -> None:
    """What all have is said once; otherwise each value comes with its ranks."""
    assert shown_by_rank(["A100", "A100"]) == "A100"
    assert shown_by_rank([None, "AVX2", "AVX2"]) == "none on rank 0 and AVX2 on ranks 1, 2"


def test_facts_are_written_as_in_json() -> None:
    """Flags are lower case; what is empty or missing is none."""
    assert [shown_fact(value) for value in (True, 0, "", None, "gloo")] == ["true", "0", "none", "none", "gloo"]


@pytest.mark.parametrize(
    ("values", "text"),
    [([], ""), ([3.0], "▅"), ([2.0, 2.0], "▅▅"), ([0.0, 1.0], "▁█"), ([0.0, math.nan, 1.0], "▁ █"), ([math.nan], " ")],
)
def test_sparkline_spans_the_values(values: list[float], text: str) -> None:
    """The lowest value is the lowest bar; constants stand in the middle, gaps are blank."""
    assert sparkline(values) == text


def test_sparkline_shows_the_latest() -> None:
    """A long course shows its end."""
    assert sparkline([9.0, *range(5)], width=5) == "▁▃▅▆█"


def test_missing_value_is_nan() -> None:
    """JSON has no NaN, so None stands for it."""
    assert shown_value(None) == "nan"


def test_output_to_a_pipe_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe gets every character."""
    monkeypatch.delenv("COLUMNS", raising=False)
    assert clipped("x" * 500) == "x" * 500


def test_line_is_clipped_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that would wrap ends in an ellipsis."""
    monkeypatch.setenv("COLUMNS", "10")
    assert clipped("abcdefghijkl") == "abcdefghi…"


def test_table_is_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns stand below their headers."""
    monkeypatch.setenv("COLUMNS", "80")
    assert list(table(ROWS)) == ["             first  second  third", "a long name  1      2       3"]


def test_columns_that_do_not_fit_follow_below(monkeypatch: pytest.MonkeyPatch) -> None:
    """A narrow terminal shows the same table in parts, each with the names of the rows."""
    monkeypatch.setenv("COLUMNS", "24")
    first, second, third = (
        [f"{'':13}{word}", f"a long name  {row}"] for word, row in zip(ROWS[0][1:], "123", strict=False)
    )
    assert list(table(ROWS)) == [*first, "", *second, "", *third]
