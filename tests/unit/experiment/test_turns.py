"""Turns: which optimizers act in a step follows from its number alone."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.experiment.pymodules.definitions import OptimSched
from pipeline.experiment.settings.settings import LossRegister, Settings, TrainingSettings
from pipeline.experiment.turns import TurnPlan


def _never(_: object) -> Any:
    raise AssertionError


def plan(optimizers: dict[str, dict[str, Any]], **training: Any) -> TurnPlan:
    """Return the turns of optimizers, with two optimised registers and one that is only recorded."""
    definitions = {name: OptimSched(_never, _never, **fields) for name, fields in optimizers.items()}
    registers = (LossRegister("d_loss"), LossRegister("g_loss"), LossRegister("accuracy", optimize=False))
    settings = Settings(1, None, registers, TrainingSettings(**training))  # type: ignore[arg-type]
    return TurnPlan(definitions, settings)


def acting(turns: TurnPlan, steps: int) -> list[list[tuple[str, ...]]]:
    """Return who acts in each turn of the first steps."""
    return [[turn.optimizers for turn in turns.of_step(step)] for step in range(steps)]


def test_without_turns_all_act_in_every_step() -> None:
    """One whole turn per step, whose losses are all recorded, and keys stay as they are."""
    (turn,) = plan({"a": {}, "b": {}}).of_step(17)
    assert turn.is_whole
    assert turn.optimizers == ("a", "b")
    assert turn.recorded == {"d_loss", "g_loss", "accuracy"}
    assert turn.key == ()


def test_turns_take_one_step_each() -> None:
    """Turn = step mod length."""
    turns = plan({"d": {}, "g": {}}, turns=(("d",), ("d",), ("g",)))
    assert acting(turns, 4) == [[("d",)], [("d",)], [("g",)], [("d",)]]


def test_shared_turns_are_all_in_every_step() -> None:
    """With share_batches each step has all turns, whose keys differ, and records each register once."""
    turns = plan(
        {"d": {"loss_registers": ("d_loss",)}, "g": {"loss_registers": ("g_loss",)}},
        turns=(("d",), ("g",)),
        share_batches=True,
    )
    first, second = turns.of_step(5)
    assert (first.optimizers, second.optimizers) == (("d",), ("g",))
    assert first.needed == {"d_loss"}
    assert second.needed == {"g_loss"}
    assert first.recorded == {"d_loss"}
    assert second.recorded == {"g_loss", "accuracy"}
    assert first.key != second.key


def test_every_k_steps_an_optimizer_acts_in_the_last_of_them() -> None:
    """every_steps = 3 acts in steps 3, 6, …; the others have no gradient for it."""
    turns = plan({"d": {}, "g": {"every_steps": 3}})
    assert acting(turns, 4) == [[("d",)], [("d",)], [("d", "g")], [("d",)]]
    assert not turns.of_step(0)[0].is_whole


@pytest.mark.parametrize("shares", [False, True])
def test_number_of_updates_is_what_counting_gives(shares: bool) -> None:
    """updates_before is closed arithmetic: the same as counting turns one by one."""
    turns = plan({"d": {}, "g": {"every_steps": 2}}, turns=(("d",), ("d", "g"), ("g",)), share_batches=shares)
    for name in ("d", "g"):
        for step in range(20):
            counted = sum(name in turn.optimizers for before in range(step) for turn in turns.of_step(before))
            assert turns.updates_before(name, step) == counted


def test_turn_in_which_nobody_acts_is_left_out() -> None:
    """Where turns share batches, one without an optimizer would only cost a pass over them."""
    turns = plan({"d": {}, "g": {"every_steps": 3}}, turns=(("d",), ("g",)), share_batches=True)
    assert acting(turns, 3) == [[("d",)], [("d",)], [("d",), ("g",)]]
    assert turns.of_step(0)[0].recorded == {"d_loss", "g_loss", "accuracy"}
