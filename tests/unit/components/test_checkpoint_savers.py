"""Checkpoint savers: which epochs keep their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.components import (
    BaseCheckpointSaver,
    ImprovementCheckpointSaver,
    PeriodicCheckpointSaver,
    UniformLossWeighter,
    WeightedLossEarlyStopper,
)
from tests.support.experiments import write_experiment
from tests.support.running import run_inside

from .losses import after_epochs


def kept(saver: Any, *values: float) -> list[int]:
    """Return the epochs that a saver keeps while the validation loss takes these values."""
    stopper, weighter, epochs = WeightedLossEarlyStopper(max_epochs=99), UniformLossWeighter(), []
    for epoch in range(len(values)):
        losses = after_epochs(*values[: epoch + 1])
        stopper.update(losses, weighter)
        saver.update(losses, weighter, stopper)
        epochs += [epoch] if saver.save_checkpoints() else []
    return epochs


@pytest.mark.parametrize(("every", "expected"), [(1, [1, 2, 3, 4, 5, 6]), (2, [2, 4, 6]), (4, [4])])
def test_every_so_many_epochs_are_kept(every: int, expected: list[int]) -> None:
    """Epoch 0 is none of them: its weights are those of init."""
    assert kept(PeriodicCheckpointSaver(every), *[1.0] * 7) == expected


def test_improvements_are_kept() -> None:
    """Every epoch that the early stopper calls better is kept, except epoch 0."""
    assert kept(ImprovementCheckpointSaver(), 5.0, 4.0, 6.0, 3.0, 3.0) == [1, 3]


def test_base_saver_keeps_nothing() -> None:
    """Without a policy there are no epoch pools."""
    assert kept(BaseCheckpointSaver(), 3.0, 2.0, 1.0) == []


@pytest.mark.parametrize(("number", "expected"), [(1, {3}), (2, {2, 3}), (None, {1, 2, 3})])
def test_number_to_keep_limits_the_pools_on_disk(tmp_path: Path, number: int | None, expected: set[int]) -> None:
    """The oldest pools go first, and none goes without a limit."""
    text = "from pipeline.components import PeriodicCheckpointSaver\n"
    text += f"checkpoint_saver = PeriodicCheckpointSaver(num_to_keep={number})\n"
    write_experiment(tmp_path, files={"pymodules/checkpoint_saver.py": text})
    run_inside(tmp_path)
    pools = (tmp_path / "experiment_results/tiny/data/module_ckps").glob("epoch_*")
    assert {int(pool.name.removeprefix("epoch_")) for pool in pools} == expected
