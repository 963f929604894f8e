"""Series for a page: few enough points to draw, and every peak still there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from pipeline.monitoring.curves import Curve

MAX_POINTS = 1500


def series(curve: Curve, max_points: int = MAX_POINTS) -> dict[str, list[float | None]]:
    """Return a curve as JSON can hold it; a gap is null, a long curve keeps the extremes of each stretch."""
    kept = curve if len(curve.values) <= max_points else _thinned(curve, max(1, max_points // 2 - 1))
    return {"x": [shortened(epoch) for epoch in kept.epochs], "y": [shortened(value) for value in kept.values]}


def shortened(value: Any) -> float | None:
    """Return a number with the digits a picture can show, or None for what is not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
        return None
    return float(f"{value:.6g}")


def _thinned(curve: Curve, num_stretches: int) -> Curve:
    epochs = np.asarray(curve.epochs, dtype=float)
    values = np.asarray(curve.values, dtype=float)
    values = np.where(np.isfinite(values), values, np.nan)
    stretches = np.array_split(np.arange(len(values)), num_stretches)
    kept = sorted({0, *(place for stretch in stretches for place in _kept(stretch, values)), len(values) - 1})
    return Curve(epochs[kept].tolist(), values[kept].tolist())


def _kept(stretch: np.ndarray, values: np.ndarray) -> Iterator[int]:
    """Yield the places of a stretch that are drawn: its extremes in their order, or one of nothing but a gap."""
    here = values[stretch]
    if np.isnan(here).all():
        yield int(stretch[0])
        return
    yield from sorted({int(stretch[np.nanargmin(here)]), int(stretch[np.nanargmax(here)])})
