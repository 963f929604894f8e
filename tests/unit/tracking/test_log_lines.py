"""Log lines: one shape for every loop, easy to grep."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest
import torch

from pipeline.components import Losses, LossRecord
from pipeline.system.formatting import shown_duration
from pipeline.tracking.log_lines import (
    shown_losses,
    shown_rates,
    step_line,
    train_line,
    val_line,
)
from pipeline.training.engines.base import StepOutcome
from pipeline.training.training import StepReport

SHAPE = re.compile(
    r"Epoch\(train\) \[3\]\[120/150\]  lr: 3\.543e-05, eta: 0:13:52, time: 0\.357, data_time: 0\.009, "
    r"memory: 15394, loss: 0\.1381, loss_a: 0\.1000, grad_norm: 1\.4511"
)
VALUES = {
    "lr": shown_rates({"main": {"all": 3.543e-05}}),
    "eta": shown_duration(832.2),
    "time": "0.357",
    "data_time": "0.009",
    "memory": "15394",
}


def losses_with(**steps: list[float]) -> Losses:
    """Return a running epoch with these step means."""
    losses: Losses = {"train": {}, "val": {}}
    for name, values in steps.items():
        losses["train"][name] = LossRecord(optimize=name != "error")
        for value in values:
            losses["train"][name].add_step(value, 1)
    return losses


def test_train_line_has_the_documented_shape() -> None:
    """Scripts that read logs find everything where it always was."""
    line = train_line(3, (120, 150), VALUES, {"loss": 0.1381, "loss_a": 0.1}, 1.4511)
    assert SHAPE.fullmatch(line)


def test_line_of_a_step_has_every_field_of_its_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop hands over a report and the experiment; which fields are shown, and how, is decided in one place."""
    monkeypatch.setattr("pipeline.tracking.log_lines.memory_in_mb", lambda device: 15394)
    outcome = StepOutcome(False, False, False, False, norms={"main": 1.4511}, norm=1.4511)
    report = StepReport(120, 150, seconds=0.357, data_seconds=0.009, outcome=outcome)
    experiment = SimpleNamespace(learning_rates=lambda: {"main": {"all": 3.543e-05}})
    losses = {"loss": 0.1381, "loss_a": 0.1}
    assert SHAPE.fullmatch(step_line(3, report, experiment, torch.device("cpu"), 832.2, losses))


def test_val_line_has_the_same_shape() -> None:
    """An evaluation is told like an epoch of training."""
    assert val_line(3, 20, {"loss": 0.5, "error": 2.0}) == "Epoch(val) [3][20/20]  loss: 0.5000, error: 2.0000"


def test_shown_loss_is_the_weighted_sum() -> None:
    """What is shown first is what is optimised; the registers follow unweighted."""
    found = shown_losses(losses_with(a=[1.0], b=[2.0], error=[9.0]), "train", {"a": 3.0, "b": 0.5, "error": 1.0}, 1)
    assert found == {"loss": 4.0, "a": 1.0, "b": 2.0, "error": 9.0}


def test_shown_loss_is_the_mean_of_the_latest_steps() -> None:
    """A line covers the steps since the line before it."""
    assert shown_losses(losses_with(a=[100.0, 1.0, 3.0]), "train", {"a": 1.0}, 2)["a"] == 2.0


def test_skipped_steps_do_not_hide_the_others() -> None:
    """A step without a value is left out of the mean."""
    assert shown_losses(losses_with(a=[math.nan, 3.0]), "train", {"a": 1.0}, 2) == {"loss": 3.0, "a": 3.0}


def test_steps_without_any_value_are_shown_as_nan() -> None:
    """If nothing is known, the line says so."""
    found = shown_losses(losses_with(a=[math.nan]), "train", {"a": 1.0}, 1)
    assert all(math.isnan(value) for value in found.values())
    assert "loss: nan" in train_line(1, (1, 1), {}, found, math.nan)


def test_rates_that_are_alike_are_shown_once() -> None:
    """Ten groups with one rate do not fill the line."""
    assert shown_rates({"a": {"x": 0.1, "y": 0.1}, "b": {"x": 0.02}}) == "1.000e-01/2.000e-02"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00:00"), (61, "0:01:01"), (90_000, "1 day, 1:00:00")])
def test_duration_reads_as_a_clock(seconds: float, text: str) -> None:
    """Seconds are rounded and grouped."""
    assert shown_duration(seconds) == text
