"""What components see of the losses."""

from __future__ import annotations

import math

import pytest

from pipeline.components import LossRecord, StaticLossWeighter, num_finished_epochs, weighted_loss

from .losses import losses_of


def test_mean_is_total_over_items() -> None:
    """A step's and an epoch's mean count every item alike."""
    record = LossRecord()
    record.add_step(6.0, 4)
    record.add_epoch(1, 9.0, 6)
    assert (record.step_means[-1], record.epoch_means[-1]) == (1.5, 1.5)


def test_nothing_recorded_has_no_mean() -> None:
    """A register without items in a step is not a number rather than zero."""
    record = LossRecord()
    record.add_step(0.0, 0)
    assert math.isnan(record.step_means[0])


def test_weighted_loss_is_the_weighted_sum_of_the_latest_means() -> None:
    """Only the latest evaluation counts, each register with its weight."""
    losses = losses_of(val={"a": [9.0, 1.0], "b": [9.0, 2.0]})
    assert weighted_loss(losses, StaticLossWeighter({"a": 3.0})) == pytest.approx(5.0)


def test_register_that_is_not_optimised_does_not_weigh() -> None:
    """Values that are merely recorded are no part of the target."""
    losses = losses_of(val={"a": [1.0], "accuracy": [100.0]})
    losses["val"]["accuracy"].optimize = False
    assert weighted_loss(losses, StaticLossWeighter({})) == 1.0


def test_nothing_evaluated_has_no_weighted_loss() -> None:
    """Without an evaluation there is nothing to judge."""
    assert weighted_loss(losses_of({"a": [1.0]}, {"a": []}), StaticLossWeighter({})) is None


def test_finished_epochs_are_counted_by_training() -> None:
    """Evaluations, of which epoch 0 has one too, do not count."""
    assert num_finished_epochs(losses_of({"a": [1.0, 1.0]}, {"a": [1.0, 1.0, 1.0]})) == 2
    assert num_finished_epochs({"train": {}, "val": {}}) == 0
