"""Runs with ``gradient_reduction: exact`` that are killed and go on with other numbers of processes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.crash.campaign import live
from tests.crash.experiment import check_same, prepare
from tests.support.running import run_process


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_other_number_of_processes_at_every_resume_gives_the_same_bits(tmp_path: Path) -> None:
    """Killed anywhere and inside writes, resumed with 3, 1, 5, 2 and 4 processes: as one process left alone."""
    undisturbed, home, draw = tmp_path / "undisturbed", tmp_path / "killed", random.Random(6)
    for folder in (undisturbed, home):
        prepare(folder, gradient_reduction="exact")
    assert run_process(undisturbed).returncode == 0
    lives = [live(home, nproc, aim, draw) for nproc, aim in ((3, "random"), (1, "write"), (5, "random"), (2, "write"))]
    assert all(life.was_killed for life in lives)
    done = run_process(home, "--auto", nproc=4)
    assert done.returncode == 0, done.stderr
    check_same(undisturbed, home)
