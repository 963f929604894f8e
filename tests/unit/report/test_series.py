"""Curves become few points, none of which lies."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from pipeline.monitoring.curves import Curve
from pipeline.report.series import MAX_POINTS, make_series, shorten


def curve_of(values: list[float]) -> Curve:
    return Curve([float(place) for place in range(len(values))], values)


def test_gaps_are_null() -> None:
    """What is no finite number is a gap, and its place is kept."""
    found = make_series(curve_of([1.0, math.nan, math.inf, 2.0]))
    assert found == {"x": [0.0, 1.0, 2.0, 3.0], "y": [1.0, None, None, 2.0]}


@pytest.mark.parametrize("values", [[], [0.25], [7.0, 7.0, 7.0]])
def test_short_curves_stay_as_they_are(values: list[float]) -> None:
    """Nothing, one point and a constant are drawn as recorded."""
    assert make_series(curve_of(values))["y"] == values


def test_long_curves_keep_every_peak() -> None:
    """A million steps become few points, with the highest and the lowest of each stretch at their places."""
    values = [math.sin(place / 1e5) for place in range(1_000_000)]
    values[123_456], values[777_777] = 50.0, -50.0
    found = make_series(curve_of(values))
    assert len(found["y"]) <= MAX_POINTS
    points = dict(zip(found["x"], found["y"], strict=True))
    assert (points[123456.0], points[777777.0], points[0.0]) == (50.0, -50.0, 0.0)
    assert found["x"][-1] == 999999
    assert all(one < other for one, other in pairwise(found["x"]) if one is not None and other is not None)


def test_long_gaps_stay_gaps() -> None:
    """A stretch without any value is still a gap in a curve that was thinned; a single lost step is not."""
    values = [1.0] * 10_000
    values[3_000:5_000] = [math.nan] * 2_000
    values[8_000] = math.nan
    found = make_series(curve_of(values), 100)
    gaps = [epoch for epoch, value in zip(found["x"], found["y"], strict=True) if value is None]
    assert gaps
    assert all(epoch is not None and 3_000 <= epoch < 5_000 for epoch in gaps)


@pytest.mark.parametrize("value", [None, "1", True, math.nan, -math.inf, [1]])
def test_only_finite_numbers_are_numbers(value: object) -> None:
    """Whatever else a file says in the place of a number is no value."""
    assert shorten(value) is None
