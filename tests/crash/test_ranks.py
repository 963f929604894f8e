"""One rank dies or dawdles while the others work."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.crash.campaign import EXPERIMENT, check_same, prepare
from tests.runs.test_stopping import step_of
from tests.support.experiments import write_experiment
from tests.support.running import BackgroundRun, run_process, send


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_killed_alone_ends_all_and_loses_nothing(tmp_path: Path, rank: int) -> None:
    """SIGKILL to one of two processes ends the run within seconds, non-zero; resumed, it ends with the same bits."""
    reference, killed = tmp_path / "reference", tmp_path / "killed"
    for home in (reference, killed):
        prepare(home)
    assert run_process(reference, nproc=2).returncode == 0
    with BackgroundRun(killed, nproc=2) as run:
        run.wait_for(lambda: step_of(killed)[0] >= 1)
        send(run.worker_pids()[rank], signal.SIGKILL)
        started = time.monotonic()
        assert run.wait() == 1
        assert time.monotonic() - started < 60
    assert run_process(killed, "--resume", nproc=2).returncode == 0
    check_same(reference, killed)


@pytest.mark.slow
def test_slow_commits_and_slow_reads_change_nothing(tmp_path: Path) -> None:
    """Rank 0 dawdling in every commit and rank 1 in its reading on resume lead to the same bits."""
    slow = """
        import os
        import time

        from pipeline.components import WeightedLossEarlyStopper


        class Stopper(WeightedLossEarlyStopper):
            def save(self, folder):
                time.sleep(1)
                super().save(folder)

            def load(self, folder):
                time.sleep(2 * int(os.environ.get("RANK", "0")))
                super().load(folder)


        early_stopper = Stopper(max_epochs=5)
    """
    reference, dawdling = tmp_path / "reference", tmp_path / "dawdling"
    prepare(reference)
    files: dict[str, str | None] = {**EXPERIMENT, "pymodules/early_stopper.py": slow}
    write_experiment(dawdling, files=files, training={"seed": 5, "checkpoint_every_steps": 1})
    assert run_process(reference, nproc=2).returncode == 0
    assert run_process(dawdling, "--stop-after-epoch", "1", nproc=2).returncode == 0
    assert run_process(dawdling, "--resume", nproc=2).returncode == 0
    check_same(reference, dawdling)
