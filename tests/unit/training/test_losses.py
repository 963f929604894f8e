"""Losses of batches: checked against the contract and added up exactly."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.distributed.processes import Processes
from pipeline.errors import PipelineError
from pipeline.training.losses import LossAccumulator, check_losses

REGISTERS = ("loss", "error")


def ledger() -> LossAccumulator:
    """Return an empty ledger of one process for steps of up to three batches."""
    return LossAccumulator(REGISTERS, 3, Processes())


def test_totals_are_sums_over_a_steps_batches() -> None:
    """Each row adds up its batches per register."""
    found = ledger()
    found.add(0, 0, {"loss": torch.tensor([1.0, 2.0]), "error": torch.tensor([5.0])})
    found.add(0, 2, {"loss": torch.tensor([4.0]), "error": torch.tensor([1.0])})
    found.add(1, 0, {"loss": torch.tensor([8.0]), "error": torch.tensor([0.0])})
    assert found.collect(2).tolist() == [[7.0, 6.0], [8.0, 0.0]]


def test_collecting_empties_the_ledger() -> None:
    """A value is recorded once, however often the ledger is asked."""
    found = ledger()
    found.add(0, 0, {"loss": torch.ones(3), "error": torch.ones(3)})
    found.collect(1)
    assert found.collect(1).tolist() == [[0.0, 0.0]]


def test_register_that_a_dataset_does_not_feed_stays_zero() -> None:
    """A batch fills the cells of its own registers only, in any order."""
    found = ledger()
    found.add(0, 0, {"error": torch.tensor([2.0])})
    assert found.collect(1).tolist() == [[0.0, 2.0]]


def test_registers_in_another_order_reach_their_cells() -> None:
    """A transform may return its registers in any order."""
    found = ledger()
    found.add(0, 0, {"error": torch.tensor([2.0]), "loss": torch.tensor([3.0])})
    assert found.collect(1).tolist() == [[3.0, 2.0]]


def test_sums_are_taken_in_double_precision() -> None:
    """A million small float32 losses do not lose digits."""
    found = ledger()
    found.add(0, 0, {"loss": torch.full((1_000_000,), 0.1), "error": torch.zeros(1)})
    assert found.collect(1)[0, 0] == pytest.approx(1_000_000 * float(torch.tensor(0.1)), rel=1e-12)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_sum_is_not_finite_if_any_loss_is_not(odd: float) -> None:
    """One bad value shows in its register's sum and in no other."""
    sums = ledger().add(0, 0, {"loss": torch.ones(3), "error": torch.tensor([1.0, odd])})
    assert not torch.isfinite(sums["error"])
    assert torch.isfinite(sums["loss"])


def test_recording_keeps_no_gradient() -> None:
    """Records hold numbers, not the graph that made them."""
    assert not ledger().add(0, 0, {"loss": torch.ones(2, requires_grad=True)})["loss"].requires_grad


BAD_LOSSES: dict[str, tuple[Any, str]] = {
    "not a dict": (torch.ones(4), "a dict of losses, but returned Tensor"),
    "nothing": (None, "a dict of losses, but returned NoneType"),
    "missing register": ({"loss": torch.ones(4)}, "all of its loss_registers, loss, error, but lacks error"),
    "unknown register": ({name: torch.ones(4) for name in (*REGISTERS, "x")}, "but also has x"),
    "averaged": ({"loss": torch.tensor(1.0), "error": torch.ones(4)}, "one value per item for 'loss', here 4"),
    "too many": ({"loss": torch.ones(4, 2), "error": torch.ones(4)}, r"shape \(4, 2\)"),
    "other device": (
        {"loss": torch.ones(4, device="meta"), "error": torch.ones(4)},
        "'loss' on the device of the run, cpu, but it is on meta\n    fix:",
    ),
    "a number": ({"loss": 3.0, "error": torch.ones(4)}, "returned 3.0"),
}


@pytest.mark.parametrize(("losses", "what"), BAD_LOSSES.values(), ids=BAD_LOSSES.keys())
def test_broken_contract_is_told_with_the_file(losses: Any, what: str) -> None:
    """A module transform that returns anything else is told what it must return."""
    with pytest.raises(PipelineError, match=what) as raised:
        check_losses(losses, REGISTERS, 4, Path("module_transforms/a.py"), torch.device("cpu"))
    assert str(raised.value).startswith("module_transforms/a.py: must return")


def test_losses_that_follow_the_contract_pass() -> None:
    """One value per item, in the order of the registers."""
    losses = {"error": torch.ones(4), "loss": torch.zeros(4, 1)}
    assert list(check_losses(losses, REGISTERS, 4, Path("x"), torch.device("cpu"))) == ["loss", "error"]


def test_sums_that_are_not_finite_are_found() -> None:
    """Of the asked row only, with batch and register."""
    accumulator = ledger()
    accumulator.add(0, 0, {"loss": torch.tensor([math.nan]), "error": torch.ones(1)})
    accumulator.add(1, 1, {"loss": torch.ones(1), "error": torch.tensor([math.inf])})
    assert accumulator.find_not_finite(0) == [(0, "loss")]
    assert accumulator.find_not_finite(1) == [(1, "error")]
    assert accumulator.find_not_finite(2) == []
