"""Losses of batches: checked against the contract and added up exactly."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.distributed.processes import Processes
from pipeline.errors import PipelineError
from pipeline.experiment.settings.settings import LossRegister
from pipeline.system.accelerators import CPU
from pipeline.training.losses import LossAccumulator, check_losses, count_items

REGISTERS = ("loss", "error")


def ledger() -> LossAccumulator:
    """Return an empty ledger of one process for steps of up to three batches."""
    return LossAccumulator(REGISTERS, 3, Processes())


def add(ledger: LossAccumulator, row: int, batch: int, losses: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Record losses with an item for each value."""
    return ledger.add(row, batch, losses, {name: loss.numel() for name, loss in losses.items()})


def check(losses: Any, items: int = 4, counts: dict[str, int] | None = None) -> dict[str, torch.Tensor]:
    """Check losses of a batch against registers that take one value per item."""
    registers = [LossRegister("loss"), LossRegister("error", optimize=False)]
    numbers = {"loss": items, "error": items, **(counts or {})}
    return check_losses(losses, registers, REGISTERS, numbers, counts, Path("module_transforms/a.py"), CPU)


def test_totals_are_sums_over_a_steps_batches() -> None:
    """Each row adds up its batches per register."""
    found = ledger()
    add(found, 0, 0, {"loss": torch.tensor([1.0, 2.0]), "error": torch.tensor([5.0])})
    add(found, 0, 2, {"loss": torch.tensor([4.0]), "error": torch.tensor([1.0])})
    add(found, 1, 0, {"loss": torch.tensor([8.0]), "error": torch.tensor([0.0])})
    assert found.collect(2)[0].tolist() == [[7.0, 6.0], [8.0, 0.0]]


def test_collecting_empties_the_ledger() -> None:
    """A value is recorded once, however often the ledger is asked."""
    found = ledger()
    add(found, 0, 0, {"loss": torch.ones(3), "error": torch.ones(3)})
    found.collect(1)
    assert found.collect(1)[0].tolist() == [[0.0, 0.0]]


def test_register_that_a_dataset_does_not_feed_stays_zero() -> None:
    """A batch fills the cells of its own registers only, in any order."""
    found = ledger()
    add(found, 0, 0, {"error": torch.tensor([2.0])})
    assert found.collect(1)[0].tolist() == [[0.0, 2.0]]


def test_registers_in_another_order_reach_their_cells() -> None:
    """A transform may return its registers in any order."""
    found = ledger()
    add(found, 0, 0, {"error": torch.tensor([2.0]), "loss": torch.tensor([3.0])})
    assert found.collect(1)[0].tolist() == [[3.0, 2.0]]


def test_sums_are_taken_in_double_precision() -> None:
    """A million small float32 losses do not lose digits."""
    found = ledger()
    add(found, 0, 0, {"loss": torch.full((1_000_000,), 0.1), "error": torch.zeros(1)})
    assert found.collect(1)[0][0, 0] == pytest.approx(1_000_000 * float(torch.tensor(0.1)), rel=1e-12)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_sum_is_not_finite_if_any_loss_is_not(odd: float) -> None:
    """One bad value shows in its register's sum and in no other."""
    sums = add(ledger(), 0, 0, {"loss": torch.ones(3), "error": torch.tensor([1.0, odd])})
    assert not torch.isfinite(sums["error"])
    assert torch.isfinite(sums["loss"])


def test_recording_keeps_no_gradient() -> None:
    """Records hold numbers, not the graph that made them."""
    assert not add(ledger(), 0, 0, {"loss": torch.ones(2, requires_grad=True)})["loss"].requires_grad


BAD_LOSSES: dict[str, tuple[Any, str]] = {
    "not a dict": (torch.ones(4), "a dict of losses, but returned Tensor"),
    "nothing": (None, "a dict of losses, but returned NoneType"),
    "missing register": ({"error": torch.ones(4)}, "all of its loss_registers, loss, error, but lacks loss"),
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
        check(losses)
    assert str(raised.value).startswith("module_transforms/a.py: must return")


def test_losses_that_follow_the_contract_pass() -> None:
    """One value per item, in the order of the registers."""
    losses = {"error": torch.ones(4), "loss": torch.zeros(4, 1)}
    assert list(check(losses)) == ["loss", "error"]


def test_sums_that_are_not_finite_are_found() -> None:
    """Of the asked row only, with batch and register."""
    accumulator = ledger()
    add(accumulator, 0, 0, {"loss": torch.tensor([math.nan]), "error": torch.ones(1)})
    add(accumulator, 1, 1, {"loss": torch.ones(1), "error": torch.tensor([math.inf])})
    assert accumulator.find_not_finite(0) == [(0, "loss")]
    assert accumulator.find_not_finite(1) == [(1, "error")]
    assert accumulator.find_not_finite(2) == []


def test_items_are_added_with_the_values() -> None:
    """A register that a batch does not have adds neither."""
    found = ledger()
    found.add(0, 0, {"loss": torch.ones(2), "error": torch.ones(2)}, {"loss": 2, "error": 2})
    found.add(0, 1, {"loss": torch.ones(3)}, {"loss": 3, "error": 3})
    assert found.collect(1)[1].tolist() == [[5, 2]]


def test_register_that_is_only_recorded_may_be_absent() -> None:
    """An accuracy that training does not need costs nothing there."""
    assert list(check({"loss": torch.ones(4)})) == ["loss"]


def test_register_without_items_may_be_absent() -> None:
    """A batch without any labelled point has no loss to return."""
    assert list(check({"error": torch.ones(4)}, counts={"loss": 0})) == ["error"]


def test_ignored_values_may_stand_beside_counted_ones() -> None:
    """torch gives 0 for targets that it ignores, so there may be more values than items, but not fewer."""
    assert check({"loss": torch.ones(4, 5)}, counts={"loss": 7})["loss"].numel() == 20
    with pytest.raises(PipelineError, match="a value for each of the 7 items that count_items gave for 'loss'"):
        check({"loss": torch.ones(4)}, counts={"loss": 7})


def test_register_per_batch_takes_one_value() -> None:
    """Whatever its shape, and however many points the batch has."""
    registers = [LossRegister("loss", per="batch")]
    items = count_items(None, registers, 4, Path("a.py"))
    assert items == {"loss": 1}
    check_losses({"loss": torch.ones(1)}, registers, ["loss"], items, None, Path("a.py"), CPU)
    with pytest.raises(PipelineError, match=r"one value per batch for 'loss', as its \"per\" is \"batch\""):
        check_losses({"loss": torch.ones(4)}, registers, ["loss"], items, None, Path("a.py"), CPU)


BAD_COUNTS: dict[str, tuple[Any, str]] = {
    "not a dict": (7, "must return a dict of counts, but returned int"),
    "negative": ({"loss": -1}, "must return an integer of 0 or more for 'loss', but returned -1"),
    "not integer": ({"loss": 1.5}, "must return an integer of 0 or more for 'loss', but returned 1.5"),
    "yes": ({"loss": True}, "must return an integer of 0 or more for 'loss', but returned True"),
    "unknown register": ({"lss": 1}, "must return counts of loss, error, but has 'lss'"),
}


@pytest.mark.parametrize(("counts", "what"), BAD_COUNTS.values(), ids=BAD_COUNTS.keys())
def test_counts_that_break_the_contract_are_refused(counts: Any, what: str) -> None:
    """The sentence names the file and the method."""
    registers = [LossRegister("loss"), LossRegister("error", optimize=False)]
    with pytest.raises(PipelineError, match=what) as raised:
        count_items(counts, registers, 4, Path("module_transforms/a.py"))
    assert str(raised.value).startswith("module_transforms/a.py: count_items must return")
