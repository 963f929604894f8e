"""Early stoppers: which evaluation is the best so far, and when to end."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from pipeline.components import (
    BaseEarlyStopper,
    RegisterEarlyStopper,
    StaticLossWeighter,
    UniformLossWeighter,
    WeightedLossEarlyStopper,
)

from .losses import after_epochs, losses_of

WEIGHTER = UniformLossWeighter()


def verdicts(stopper: Any, *values: float, direction: str = "min") -> list[tuple[bool, bool]]:
    """Return (improved, stops) after each evaluation."""
    found = []
    for count in range(1, len(values) + 1):
        stopper.update(after_epochs(*values[:count], direction=direction), WEIGHTER)
        found.append((stopper.improvement(), stopper.early_stop()))
    return found


def improvements(stopper: Any, *values: float, direction: str = "min") -> list[bool]:
    """Return whether each evaluation improved."""
    return [improved for improved, _ in verdicts(stopper, *values, direction=direction)]


def test_first_evaluation_improves_and_lower_is_better() -> None:
    """Epoch 0 sets the mark, equal is no improvement."""
    stopper = WeightedLossEarlyStopper(max_epochs=99)
    assert improvements(stopper, 3.0, 2.0, 2.0, 2.5, 1.0) == [True, True, False, False, True]
    assert (stopper.best, stopper.best_epoch) == (1.0, 4)


def test_not_a_number_never_improves() -> None:
    """A value that is not finite is not the best, not even as the first."""
    stopper = WeightedLossEarlyStopper(max_epochs=99)
    values = (math.nan, math.inf, 2.0, math.nan, -math.inf, 1.0)
    assert improvements(stopper, *values) == [False, False, True, False, False, True]


def test_not_a_number_uses_up_patience() -> None:
    """An experiment that only yields NaN ends."""
    stopper = WeightedLossEarlyStopper(patience=2)
    assert [stops for _, stops in verdicts(stopper, 1.0, math.nan, math.nan)] == [False, False, True]


def test_register_with_direction_max_improves_upwards() -> None:
    """The direction is that of the register's settings."""
    stopper = RegisterEarlyStopper("loss", max_epochs=99)
    assert improvements(stopper, 0.5, 0.4, 0.6, direction="max") == [True, False, True]


def test_register_stopper_looks_at_its_register_only() -> None:
    """Other registers may go where they like."""
    stopper = RegisterEarlyStopper("b", max_epochs=99)
    stopper.update(losses_of(val={"a": [1.0], "b": [5.0]}), WEIGHTER)
    assert stopper.best == 5.0


def test_weighted_stopper_uses_the_weights() -> None:
    """The target is the weighted sum, so weights decide what is better."""
    stopper = WeightedLossEarlyStopper(max_epochs=9)
    stopper.update(losses_of(val={"a": [1.0], "b": [5.0]}), StaticLossWeighter({"b": 10.0}))
    assert stopper.best == 51.0


def test_patience_counts_evaluations_in_a_row() -> None:
    """An improvement starts the count anew."""
    found = verdicts(WeightedLossEarlyStopper(patience=2), 3.0, 4.0, 2.0, 4.0, 4.0)
    assert [stops for _, stops in found] == [False, False, False, False, True]


def test_startup_does_not_count_as_waiting() -> None:
    """During the first epochs patience is not used up, but the best is kept."""
    stopper = WeightedLossEarlyStopper(patience=1, startup=2)
    assert [stops for _, stops in verdicts(stopper, 1.0, 2.0, 2.0, 2.0)] == [False, False, False, True]
    assert stopper.best == 1.0


def test_last_epoch_stops_in_any_case() -> None:
    """max_epochs ends the experiment even while it improves."""
    found = verdicts(WeightedLossEarlyStopper(max_epochs=2), 3.0, 2.0, 1.0)
    assert found == [(True, False), (True, False), (True, True)]


@pytest.mark.parametrize(
    ("tolerances", "expected"),
    [
        ({}, True),
        ({"abs_tol": 0.4}, True),
        ({"abs_tol": 0.5}, False),
        ({"rel_tol": 0.04}, True),
        ({"rel_tol": 0.06}, False),
    ],
)
def test_better_means_by_more_than_the_tolerance(tolerances: dict[str, float], expected: bool) -> None:
    """From 10 to 9.5 is an improvement of 0.5, or of five percent."""
    stopper = WeightedLossEarlyStopper(max_epochs=99, **tolerances)  # type: ignore[arg-type]
    assert improvements(stopper, 10.0, 9.5) == [True, expected]


def test_tolerance_works_upwards_too() -> None:
    """With direction max the margin lies above the best."""
    stopper = RegisterEarlyStopper("loss", max_epochs=99, abs_tol=0.1)
    assert improvements(stopper, 0.5, 0.55, 0.7, direction="max") == [True, False, True]


def test_update_without_a_new_evaluation_is_no_verdict() -> None:
    """Without validation an old value is not judged again."""
    stopper = WeightedLossEarlyStopper(patience=1)
    stopper.update(after_epochs(1.0), WEIGHTER)
    stopper.update(losses_of({"loss": [1.0]}, {"loss": [1.0]}), WEIGHTER)
    assert (stopper.improvement(), stopper.early_stop()) == (False, False)


def test_limit_of_steps_is_a_number_of_steps() -> None:
    """A training of no steps is not a plan."""
    with pytest.raises(ValueError, match="max_steps must be 1 or more, but is 0"):
        WeightedLossEarlyStopper(max_steps=0)


def test_state_comes_back_with_the_same_bits(tmp_path: Path) -> None:
    """A restored stopper gives the same verdicts as one that never stopped."""
    first, second = (WeightedLossEarlyStopper(patience=3, max_epochs=9) for _ in range(2))
    verdicts(first, 3.0, 0.1 + 0.2, 2.0)
    first.save(tmp_path)
    second.load(tmp_path)
    assert vars(second) == vars(first)
    values = (3.0, 0.1 + 0.2, 2.0, 2.0, 2.0)
    for stopper in (first, second):
        for count in (4, 5):
            stopper.update(after_epochs(*values[:count]), WEIGHTER)
    assert (first.early_stop(), second.early_stop()) == (True, True)


def test_stopper_that_has_seen_nothing_survives(tmp_path: Path) -> None:
    """The state before the first evaluation can be saved and loaded."""
    first, second = (WeightedLossEarlyStopper(max_epochs=1) for _ in range(2))
    first.save(tmp_path)
    second.load(tmp_path)
    assert second.best is None


def test_base_stopper_neither_improves_nor_stops() -> None:
    """What a subclass leaves out does nothing."""
    assert verdicts(BaseEarlyStopper(), 2.0, 1.0) == [(False, False), (False, False)]
