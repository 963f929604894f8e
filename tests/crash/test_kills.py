"""SIGKILL of everything, at random instants and inside writes, under a real torchrun."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.crash.campaign import Campaign
from tests.crash.experiment import SEED


def survive(folder: Path, undisturbed: Callable[[int], Path], nproc: int, num_kills: int) -> None:
    """Run a campaign whose first round has the seed of the shared reference."""
    campaign = Campaign(folder, nproc, SEED, {SEED: undisturbed(nproc)})
    lives = list(campaign.run(num_kills))
    print(campaign.table, *lives, sep="\n")
    assert len(lives) == num_kills
    assert campaign.table.is_passed, campaign.table


@pytest.mark.parametrize("nproc", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_killed_runs_end_with_the_same_bits(tmp_path: Path, undisturbed: Callable[[int], Path], nproc: int) -> None:
    """A run killed mid-epoch and mid-write ends like one that was never killed."""
    survive(tmp_path, undisturbed, nproc, 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("nproc", [1, 4])
def test_runs_killed_many_times_end_with_the_same_bits(
    tmp_path: Path, undisturbed: Callable[[int], Path], nproc: int
) -> None:
    """Five kills per number of processes change nothing."""
    survive(tmp_path, undisturbed, nproc, 5)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("nproc", "training"),
    [(2, {"parallelism": "fsdp"}), (3, {"gradient_reduction": "exact"})],
    ids=["fsdp", "exact"],
)
def test_kills_are_as_harmless_with_other_engines(tmp_path: Path, nproc: int, training: dict[str, Any]) -> None:
    """Kills inside writes that processes share, and of runs that promise more, change nothing either."""
    campaign = Campaign(tmp_path, nproc, SEED, training=training)
    assert len(list(campaign.run(4))) == 4
    assert campaign.table.is_passed, campaign.table


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("nproc", [1, 2, 4])
def test_kills_at_any_instant_of_a_life_lock_nobody_out(tmp_path: Path, nproc: int) -> None:
    """Killed while it starts, finds other processes, trains or ends, a run starts again and leaves nothing behind."""
    campaign = Campaign(tmp_path, nproc, SEED, anywhere=True)
    assert len(list(campaign.run(4))) == 4
    assert campaign.table.is_passed, campaign.table
