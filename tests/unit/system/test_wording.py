"""Numbers as people read them."""

from __future__ import annotations

import math

import pytest

from pipeline.system.formatting import shown_by_rank, shown_bytes, shown_fact, shown_number, shown_value, sparkline


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e12, "2.5 TB")])
def test_sizes_have_units(count: float, text: str) -> None:
    """Sizes are told in the unit that keeps them short."""
    assert shown_bytes(count) == text


def test_one_of_a_thing_is_singular() -> None:
    """Any other number is plural."""
    assert [shown_number(count, "process", "processes") for count in (1, 2)] == ["1 process", "2 processes"]


def test_values_of_ranks_are_told_apart() -> None:
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
