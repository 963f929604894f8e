"""SIGKILL of everything, at random instants and inside writes, under a real torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.campaign import check_same, prepare, survive_kills
from tests.support.running import run_process

SEED = 20


def survive(tmp_path: Path, nproc: int, num_kills: int, seed: int) -> None:
    reference, killed = tmp_path / "reference", tmp_path / "killed"
    prepare(reference)
    prepare(killed)
    assert run_process(reference, nproc=nproc).returncode == 0
    lives = list(survive_kills(killed, nproc, num_kills, seed))
    print(f"{nproc} processes, seed {seed}: {len(lives)} kills survived", *lives, sep="\n  ")
    assert len(lives) == num_kills
    check_same(reference, killed)


@pytest.mark.parametrize(("nproc", "num_kills"), [(1, 2), (2, 2), (4, 2)])
def test_killed_runs_end_with_the_same_bits(tmp_path: Path, nproc: int, num_kills: int) -> None:
    """A run killed several times, mid-epoch and mid-write, ends like one that was never killed."""
    survive(tmp_path, nproc, num_kills, SEED)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("nproc", [1, 2, 4])
def test_runs_killed_many_times_end_with_the_same_bits(tmp_path: Path, nproc: int) -> None:
    """Eight kills per number of processes change nothing."""
    survive(tmp_path, nproc, 8, SEED + 1)
