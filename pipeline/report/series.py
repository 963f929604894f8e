"""Series for a page: few enough points to draw, and every peak still there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypedDict

import numpy as np

from pipeline.monitoring.curves import Curve, Steps
from pipeline.monitoring.journal import EPOCH, Event
from pipeline.monitoring.json_values import as_int, as_number

MAX_POINTS = 1500


class Series(TypedDict):
    """A curve as the page draws it; None is a gap."""

    x: list[float | None]
    y: list[float | None]


def make_series(curve: Curve, max_points: int = MAX_POINTS) -> Series:
    """Return a curve as JSON can hold it; a long one keeps the extremes of each stretch."""
    drawn = curve
    if len(curve.values) > max_points:
        epochs = np.asarray(curve.epochs, dtype=float)
        values = np.asarray(curve.values, dtype=float)
        # The extremes below skip NaN, but would take an infinity for a peak.
        values = np.where(np.isfinite(values), values, np.nan)
        # A stretch keeps two points; two more are the ends of the curve.
        stretches = np.array_split(np.arange(len(values)), max(1, max_points // 2 - 1))
        kept = {0, len(values) - 1}.union(*(_choose_points(stretch, values) for stretch in stretches))
        drawn = Curve(epochs[sorted(kept)].tolist(), values[sorted(kept)].tolist())
    return {"x": [shorten(epoch) for epoch in drawn.epochs], "y": [shorten(value) for value in drawn.values]}


def _choose_points(stretch: np.ndarray, values: np.ndarray) -> set[int]:
    """Return the points of a stretch that are drawn: its extremes, or one point of a gap."""
    here = values[stretch]
    if np.isnan(here).all():
        return {int(stretch[0])}
    return {int(stretch[np.nanargmin(here)]), int(stretch[np.nanargmax(here)])}


def shorten(value: object) -> float | None:
    """Return a number with the digits a picture can show, or None for what is not a finite number."""
    # Called for every point of every curve, so the commonest type comes first.
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    number = as_number(value)
    return None if number is None else float(f"{number:.6g}")


def count_steps_per_epoch(steps: Steps) -> int:
    """Return the number of steps of an epoch, or 0 if it is unknown."""
    # The first step of the first epoch is at one n-th of it.
    first = next((curve.epochs[0] for curve in steps.rates.values() if curve.epochs), None)
    return round(1 / first) if first and first <= 1 else 0


def collect_epoch_costs(journal: Sequence[Event], num_steps: int) -> dict[str, dict[str, Curve]]:
    """Return the seconds that epochs took and the memory they needed, as far as the journal has them."""
    noted: dict[tuple[int, str], list[dict[str, object]]] = {}
    for event in journal:
        epoch = as_int(event.facts.get("epoch"))
        split = event.facts.get("split")
        if event.kind == EPOCH and epoch is not None and split in ("train", "val"):
            # An epoch that was interrupted is noted by each of its starts.
            noted.setdefault((epoch, str(split)), []).append(event.facts)
    times = {"training": Curve(), "loading data": Curve(), "validation": Curve()}
    memory = Curve()
    for (epoch, split), parts in sorted(noted.items()):
        if split == "train":
            _add(times["training"], epoch, _scale_to_epoch(parts, "seconds", num_steps))
            _add(times["loading data"], epoch, _scale_to_epoch(parts, "data_seconds", num_steps))
            _add(memory, epoch, as_number(parts[-1].get("memory")))
        else:
            _add(times["validation"], epoch, as_number(parts[-1].get("seconds")))
    return {"times": times, "memory": {"memory": memory}}


def _add(curve: Curve, epoch: int, value: float | None) -> None:
    curve.epochs.append(epoch)
    curve.values.append(math.nan if value is None else value)


def _scale_to_epoch(parts: list[dict[str, object]], name: str, num_steps: int) -> float | None:
    """Return the seconds of a whole epoch: those of the noted parts, scaled to all steps.

    A start that was killed has noted nothing of the epoch it was in.
    """
    seconds = 0.0
    num_noted = 0
    for part in parts:
        duration = shorten(part.get(name))
        steps = part.get("steps")
        if duration is None or not isinstance(steps, list) or len(steps) != 2:
            continue
        first, last = map(as_int, steps)
        if first is not None and last is not None and last >= first:
            seconds += duration
            num_noted += last - first + 1
    return seconds * (num_steps or num_noted) / num_noted if num_noted else None
