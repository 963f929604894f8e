"""Schedulers: how learning rates change, and that they go on after a resume as if nothing had happened."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, ReduceLROnPlateau, StepLR

from pipeline.components import BaseScheduler, Losses, LossRecord, TorchScheduler, WarmupScheduler

NUM_STEPS = 4


def optimizer_with(*rates: float) -> Optimizer:
    """Return an optimizer with one group per rate."""
    return SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates], lr=1.0)


def rates(optimizer: Optimizer) -> list[float]:
    """Return the rates in force."""
    return [group["lr"] for group in optimizer.param_groups]


def train(scheduler: BaseScheduler, optimizer: Optimizer, num_epochs: int = 1) -> list[float]:
    """Return the first group's rate at every step of so many epochs."""
    seen = []
    for _ in range(num_epochs):
        scheduler.before_train_epoch(NUM_STEPS)
        for step in range(1, NUM_STEPS + 1):
            seen.append(rates(optimizer)[0])
            optimizer.step()
            scheduler.after_train_step(step)
        scheduler.after_train_epoch()
    return seen


def restored(tmp_path: Path, scheduler: BaseScheduler, optimizer: Optimizer) -> tuple[BaseScheduler, Optimizer]:
    """Return what a new process has after loading what this one saved."""
    scheduler.save(tmp_path)
    fresh = warming_up(0.4, 2) if isinstance(scheduler, WarmupScheduler) else stepping(0.4, "step")
    fresh[1].load_state_dict(optimizer.state_dict())
    fresh[0].load(tmp_path)
    return fresh


def stepping(rate: float, per: str) -> tuple[TorchScheduler, Optimizer]:
    """Return torch's StepLR, which halves the rate each time it is stepped."""
    optimizer = optimizer_with(rate)
    return TorchScheduler(StepLR(optimizer, step_size=1, gamma=0.5), per=per), optimizer


def warming_up(rate: float, epochs: float) -> tuple[WarmupScheduler, Optimizer]:
    """Return a warm-up over so many epochs, followed by a decay per step."""
    optimizer = optimizer_with(rate)
    then = TorchScheduler(ExponentialLR(optimizer, 0.5), per="step")
    return WarmupScheduler(optimizer, epochs, then, start_factor=0.2), optimizer


def test_base_scheduler_leaves_rates_alone() -> None:
    """A scheduler that overrides nothing does nothing."""
    optimizer = optimizer_with(0.3)
    assert train(BaseScheduler(), optimizer, 2) == [0.3] * 8


def test_adapter_steps_once_per_epoch() -> None:
    """Within an epoch the rate stays."""
    scheduler, optimizer = stepping(8.0, "epoch")
    assert train(scheduler, optimizer, 2) == [8.0] * 4 + [4.0] * 4


def test_adapter_steps_once_per_step() -> None:
    """Every step has a rate of its own."""
    scheduler, optimizer = stepping(8.0, "step")
    assert train(scheduler, optimizer) == [8.0, 4.0, 2.0, 1.0]


def test_adapter_refuses_any_other_rhythm() -> None:
    """A misspelt rhythm would never step."""
    with pytest.raises(ValueError, match='"step" or "epoch"'):
        stepping(1.0, "batch")


def test_adapter_of_a_plateau_needs_a_register() -> None:
    """What it follows is named when it is made, and is for it alone."""
    with pytest.raises(ValueError, match="none is named"):
        TorchScheduler(ReduceLROnPlateau(optimizer_with(1.0)))
    with pytest.raises(ValueError, match="register is for ReduceLROnPlateau, but StepLR follows"):
        TorchScheduler(StepLR(optimizer_with(1.0), 1), register="loss")


def evaluated(*values: float) -> Losses:
    return {"val": {"loss": LossRecord(epoch_means=list(values))}}


def test_plateau_follows_evaluations_and_no_steps(tmp_path: Path) -> None:
    """It is stepped by evaluations alone; a value that is not a number is no improvement, and its counts survive."""
    optimizer = optimizer_with(1.0)

    def adapted() -> TorchScheduler:
        return TorchScheduler(ReduceLROnPlateau(optimizer, factor=0.5, patience=1), register="loss")

    scheduler = adapted()
    scheduler.initialize(3)
    for value in (1.0, math.nan):
        scheduler.after_evaluation(evaluated(value))
        train(scheduler, optimizer, 1)
    assert optimizer.param_groups[0]["lr"] == 1.0
    scheduler.save(tmp_path)
    scheduler = adapted()
    scheduler.load(tmp_path)
    scheduler.after_evaluation(evaluated(1.0, math.nan, 0.99999))
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_plateau_waits_for_the_end_of_a_warm_up() -> None:
    """While rates rise, evaluations are not counted."""
    optimizer = optimizer_with(1.0)
    plateau = TorchScheduler(ReduceLROnPlateau(optimizer, factor=0.5, patience=0), register="loss")
    scheduler = WarmupScheduler(optimizer, 1, plateau)
    scheduler.initialize(1)
    scheduler.after_evaluation(evaluated(1.0))
    train(scheduler, optimizer, 1)
    scheduler.after_evaluation(evaluated(1.0, 2.0))
    assert optimizer.param_groups[0]["lr"] == 1.0
    scheduler.after_evaluation(evaluated(1.0, 2.0, 3.0))
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    "create",
    [
        lambda optimizer: TorchScheduler(StepLR(optimizer, 1, gamma=0.5)),
        lambda optimizer: TorchScheduler(LambdaLR(optimizer, lambda count: 0.5**count)),
        lambda optimizer: WarmupScheduler(optimizer, 1, TorchScheduler(StepLR(optimizer, 1, gamma=0.5))),
    ],
    ids=["step", "lambda", "warm-up"],
)
def test_group_that_is_added_later_keeps_its_rate(create: Callable[[Optimizer], BaseScheduler]) -> None:
    """A scheduler has no base rate of it, and must not take it for another."""
    optimizer = optimizer_with(1.0)
    scheduler = create(optimizer)
    scheduler.initialize(1)
    train(scheduler, optimizer, 1)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.3})
    train(scheduler, optimizer, 2)
    assert [group["lr"] for group in optimizer.param_groups][1:] == [0.3]
    assert optimizer.param_groups[0]["lr"] < 1.0


def test_adapter_goes_on_where_it_stood(tmp_path: Path) -> None:
    """Saved in the middle of an epoch and restored, the rates are those of one that never stopped."""
    whole = train(*stepping(0.4, "step"), num_epochs=3)
    scheduler, optimizer = stepping(0.4, "step")
    first = train(scheduler, optimizer, 1)
    assert first + train(*restored(tmp_path, scheduler, optimizer), num_epochs=2) == whole


def test_adapter_of_a_lambda_survives(tmp_path: Path) -> None:
    """Functions are not saved, and what is saved loads without running code."""
    first, second = (TorchScheduler(LambdaLR(optimizer_with(1.0), lambda count: 1 / (1 + count))) for _ in range(2))
    train(first, first.torch_scheduler.optimizer)
    first.save(tmp_path)
    second.load(tmp_path)
    assert second.torch_scheduler.last_epoch == first.torch_scheduler.last_epoch == 1


def test_warm_up_rises_to_the_full_rate() -> None:
    """The first step has the start factor, and the last one before the end almost all."""
    scheduler, optimizer = warming_up(1.0, 1)
    assert train(scheduler, optimizer) == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert rates(optimizer) == pytest.approx([1.0])


def test_warm_up_may_take_several_epochs() -> None:
    """The rise is even over all of them."""
    scheduler, optimizer = warming_up(1.0, 2)
    assert train(scheduler, optimizer, 2) == pytest.approx([0.2 + 0.1 * step for step in range(8)])


def test_warm_up_keeps_the_relation_between_groups() -> None:
    """Each group rises to a full rate of its own."""
    optimizer = optimizer_with(1.0, 0.1)
    train(WarmupScheduler(optimizer, 1), optimizer)
    assert rates(optimizer) == pytest.approx([1.0, 0.1])


def test_warm_up_hands_over_at_the_full_rate() -> None:
    """The scheduler behind it begins with the epoch after the warm-up."""
    scheduler, optimizer = warming_up(1.0, 1)
    assert train(scheduler, optimizer, 2)[4:] == pytest.approx([1.0, 0.5, 0.25, 0.125])


def test_warm_up_saved_in_the_middle_goes_on(tmp_path: Path) -> None:
    """Restored between two steps of a warm-up epoch, the rates have the same bits as without a stop."""
    whole, twin = warming_up(0.4, 2), warming_up(0.4, 2)
    expected = train(*whole, num_epochs=2)
    scheduler, optimizer = twin
    scheduler.before_train_epoch(NUM_STEPS)
    for step in (1, 2):
        optimizer.step()
        scheduler.after_train_step(step)
    scheduler, optimizer = restored(tmp_path, scheduler, optimizer)  # type: ignore[assignment]
    seen = [rates(optimizer)[0]]
    for step in (3, 4):
        optimizer.step()
        scheduler.after_train_step(step)
        seen.append(rates(optimizer)[0])
    scheduler.after_train_epoch()
    assert seen[:2] == expected[2:4]
    assert train(scheduler, optimizer) == expected[4:]


def test_warm_up_restored_after_it_ended_goes_on(tmp_path: Path) -> None:
    """What stands behind the warm-up is saved and restored with it."""
    expected = train(*warming_up(0.4, 2), num_epochs=4)
    scheduler, optimizer = warming_up(0.4, 2)
    train(scheduler, optimizer, 3)
    assert train(*restored(tmp_path, scheduler, optimizer)) == expected[12:]


def test_warm_up_passes_the_start_epoch_on() -> None:
    """The following scheduler is initialised once, with the first epoch after the warm-up."""

    class Listener(BaseScheduler):
        heard: int | None = None

        def initialize(self, start_epoch: int) -> None:
            self.heard = start_epoch

    listener = Listener()
    WarmupScheduler(optimizer_with(1.0), 1, listener).initialize(3)
    assert listener.heard == 4


def test_warm_up_of_steps_goes_over_into_the_next_scheduler_at_once() -> None:
    """Five steps of warm-up, two epochs of four steps: the decay begins inside the second epoch."""
    optimizer = SGD([{"name": "all", "params": [torch.nn.Parameter(torch.zeros(1))]}], lr=1.0)
    decay = TorchScheduler(StepLR(optimizer, step_size=1, gamma=0.5), per="step")
    scheduler = WarmupScheduler(optimizer, warmup_steps=5, then=decay, start_factor=0.0)
    scheduler.initialize(1)
    rates = []
    for _ in range(2):
        scheduler.before_train_epoch(4)
        for step in range(1, 5):
            rates.append(optimizer.param_groups[0]["lr"])
            scheduler.after_train_step(step)
        scheduler.after_train_epoch()
    assert rates == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0, 0.5, 0.25])


@pytest.mark.parametrize("given", [{}, {"warmup_epochs": 1, "warmup_steps": 3}])
def test_warm_up_is_given_in_one_unit(given: dict[str, int]) -> None:
    """Neither and both would be a riddle."""
    optimizer = SGD([{"name": "all", "params": [torch.nn.Parameter(torch.zeros(1))]}], lr=1.0)
    with pytest.raises(ValueError, match="warmup_epochs or warmup_steps, and not both"):
        WarmupScheduler(optimizer, **given)
