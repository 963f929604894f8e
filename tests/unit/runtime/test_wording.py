"""Numbers as people read them."""

from __future__ import annotations

import math

import pytest

from pipeline.runtime.wording import shown_bytes, shown_value, sparkline


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e12, "2.5 TB")])
def test_sizes_have_units(count: float, text: str) -> None:
    """Sizes are told in the unit that keeps them short."""
    assert shown_bytes(count) == text


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
