"""Loss weighters: how much each register counts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from pipeline.components import (
    DynamicWeightAverage,
    Losses,
    LossRecord,
    MovingAverageLossWeighter,
    StaticLossWeighter,
    UniformLossWeighter,
)

from .losses import losses_of


def weights(weighter: Any, *registers: str) -> list[float]:
    """Return the weights that hold now."""
    return [weighter.get_loss_weight(register) for register in registers]


def after_steps(**steps: list[float]) -> Losses:
    """Return a running epoch with these step means."""
    records: Losses = {"train": {}, "val": {}}
    for register, values in steps.items():
        records["train"][register] = LossRecord()
        for value in values:
            records["train"][register].add_step(value, 1)
    return records


def balanced(decay: float, **steps: list[float]) -> MovingAverageLossWeighter:
    """Return a moving average that has seen these steps one after the other."""
    weighter = MovingAverageLossWeighter(decay)
    for count in range(1, len(next(iter(steps.values()))) + 1):
        weighter.after_train_step(after_steps(**{name: values[:count] for name, values in steps.items()}))
    return weighter


def test_uniform_weights_are_one() -> None:
    """Every register counts alike."""
    assert weights(UniformLossWeighter(), "a", "b") == [1.0, 1.0]


def test_static_weights_are_those_given() -> None:
    """A register that is not named weighs one."""
    assert weights(StaticLossWeighter({"a": 3, "b": 0}), "a", "b", "c") == [3.0, 0.0, 1.0]


def test_static_weights_do_not_follow_the_authors_dict() -> None:
    """Changing the dict afterwards changes nothing."""
    given = {"a": 3.0}
    weighter = StaticLossWeighter(given)
    given["a"] = 5.0
    assert weighter.get_loss_weight("a") == 3.0


def test_dynamic_average_favours_what_falls_slowly() -> None:
    """The weights are the softmax of the loss ratios, scaled to the number of registers."""
    weighter = DynamicWeightAverage(temperature=2.0)
    weighter.before_train_epoch(losses_of({"fast": [4.0, 1.0], "slow": [4.0, 4.0]}))
    fast, slow = math.exp(0.25 / 2), math.exp(1.0 / 2)
    assert weights(weighter, "fast", "slow") == pytest.approx([2 * fast / (fast + slow), 2 * slow / (fast + slow)])


def test_dynamic_average_begins_uniformly() -> None:
    """Until two epochs are known all registers weigh one."""
    weighter = DynamicWeightAverage()
    weighter.before_train_epoch(losses_of({"a": [4.0], "b": [2.0]}))
    assert weights(weighter, "a", "b") == [1.0, 1.0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_dynamic_average_keeps_its_weights_over_losses_that_are_not_finite(value: float) -> None:
    """A loss that is not finite cannot spoil the weights."""
    weighter = DynamicWeightAverage()
    weighter.before_train_epoch(losses_of({"a": [4.0, 1.0], "b": [1.0, 1.0]}))
    before = weights(weighter, "a", "b")
    weighter.before_train_epoch(losses_of({"a": [4.0, 1.0, value], "b": [1.0, 1.0, 1.0]}))
    assert weights(weighter, "a", "b") == before


def test_dynamic_average_does_not_overflow() -> None:
    """A huge ratio at a low temperature still gives finite weights that sum to the number of registers."""
    weighter = DynamicWeightAverage(temperature=0.01)
    weighter.before_train_epoch(losses_of({"a": [1e-9, 1e9], "b": [1.0, 1.0]}))
    assert weights(weighter, "a", "b") == pytest.approx([2.0, 0.0])


def test_dynamic_average_leaves_out_what_is_not_optimised() -> None:
    """A value that is merely recorded takes no weight from the others."""
    losses = losses_of({"a": [2.0, 1.0], "accuracy": [0.1, 0.9]})
    losses["train"]["accuracy"].optimize = False
    weighter = DynamicWeightAverage()
    weighter.before_train_epoch(losses)
    assert weights(weighter, "a") == [1.0]


def test_moving_average_brings_losses_to_one_scale() -> None:
    """Weights are inverse to the losses and sum to the number of registers."""
    found = weights(balanced(0.9, a=[10.0], b=[1.0]), "a", "b")
    assert found[0] * 10.0 == pytest.approx(found[1] * 1.0)
    assert sum(found) == pytest.approx(2.0)


def test_moving_average_keeps_a_share_of_the_old() -> None:
    """With a decay of 0.75 a quarter of each new loss enters."""
    assert balanced(0.75, a=[4.0, 8.0]).averages == {"a": pytest.approx(5.0)}


def test_moving_average_ignores_skipped_steps() -> None:
    """A step without a finite loss leaves the average as it was."""
    assert balanced(0.5, a=[4.0, math.nan, math.inf]).averages == {"a": 4.0}


def test_moving_average_survives_a_loss_of_zero() -> None:
    """A register that has reached zero gives finite weights."""
    assert all(math.isfinite(weight) for weight in weights(balanced(0.5, a=[0.0, 0.0], b=[1.0, 1.0]), "a", "b"))


def test_moving_average_comes_back_with_the_same_bits(tmp_path: Path) -> None:
    """A restored weighter continues exactly like one that never stopped."""
    first, second = balanced(0.9, a=[1 / 3, 0.1], b=[7 / 11, 2.0]), MovingAverageLossWeighter(0.9)
    first.save(tmp_path)
    second.load(tmp_path)
    assert (second.weights, second.averages) == (first.weights, first.averages)
    for weighter in (first, second):
        weighter.after_train_step(after_steps(a=[0.3], b=[0.7]))
    assert weights(first, "a", "b") == weights(second, "a", "b")


def test_dynamic_average_comes_back_with_the_same_bits(tmp_path: Path) -> None:
    """The weights of the running epoch survive a resume in the middle of it."""
    first, second = DynamicWeightAverage(), DynamicWeightAverage()
    first.before_train_epoch(losses_of({"a": [1 / 3, 1 / 7], "b": [3.0, 2.9]}))
    first.save(tmp_path)
    second.load(tmp_path)
    assert weights(second, "a", "b") == weights(first, "a", "b")
    assert weights(second, "a", "b") != [1.0, 1.0]
