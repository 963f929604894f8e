"""Recorded steps become curves over epochs."""

from __future__ import annotations

import numpy as np

from pipeline.monitoring.curves import Curve


def test_step_without_items_is_left_out_and_a_skipped_one_is_a_gap() -> None:
    """A register that no batch of a step feeds says nothing there; a step that was skipped had a value and lost it."""
    curve = Curve()
    curve.add(2, np.array([1.0, np.nan, 3.0, np.nan]), 4, items=np.array([2, 0, 2, 2]))
    assert curve.epochs == [1.25, 1.75, 2.0]
    assert curve.values[:2] == [1.0, 3.0]
    assert np.isnan(curve.values[2])
