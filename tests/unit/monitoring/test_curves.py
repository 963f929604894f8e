"""Recorded steps become curves over epochs."""

from __future__ import annotations

import numpy as np

from pipeline.monitoring.curves import Curve, Steps


def test_step_without_items_is_left_out_and_a_skipped_one_is_a_gap() -> None:
    """A register that no batch of a step feeds says nothing there; a step that was skipped had a value and lost it."""
    curve = Curve()
    curve.add(2, np.array([1.0, np.nan, 3.0, np.nan]), 4, items=np.array([2, 0, 2, 2]))
    assert curve.epochs == [1.25, 1.75, 2.0]
    assert curve.values[:2] == [1.0, 3.0]
    assert np.isnan(curve.values[2])


def test_column_that_begins_in_a_later_segment_has_a_gap() -> None:
    """The rate of a group that was added within the running epoch is drawn from its first step on."""
    known = {"skipped": np.zeros(2, dtype=bool), "lr/main/trunk": np.asarray([0.1, 0.1])}
    steps = Steps()
    steps.add_running(1, [known, {**known, "lr/main/late": np.asarray([0.3, 0.2])}], 4)
    np.testing.assert_array_equal(steps.rates["main/late"].values, [np.nan, np.nan, 0.3, 0.2])
    assert steps.rates["main/trunk"].values == [0.1] * 4
