"""One process dies, stops or dawdles while the others work."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.experiment import check_same, prepare
from tests.crash.scenarios import (
    PHASES,
    Victim,
    freeze_rank,
    kill_launcher,
    kill_launcher_at_once,
    kill_loader_worker,
    kill_rank,
    pause_rank,
    restart,
    signal_rank,
    signal_scenarios,
)
from tests.support.running import run_process

Undisturbed = Callable[[int], Path]


@pytest.fixture
def victim(tmp_path: Path) -> Victim:
    """The experiment on two processes, before its first start."""
    prepare(tmp_path)
    return Victim(tmp_path, nproc=2)


def check_end(victim: Victim, undisturbed: Undisturbed) -> None:
    """Left alone at last, the experiment ends as if nothing had happened."""
    victim.finish()
    check_same(undisturbed(victim.nproc), victim.home)


@pytest.mark.slow
def test_accidents_one_after_another_change_nothing(victim: Victim, undisturbed: Undisturbed) -> None:
    """Rank 0 killed in a commit, torchrun killed, one rank asked to stop: three lives that lead to the same bits."""
    kill_rank(victim, "commit", rank=0)
    kill_launcher(victim, "training")
    signal_rank(victim, signal.SIGTERM, rank=1)
    check_end(victim, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_killed_alone_in_every_phase_ends_all_and_loses_nothing(
    victim: Victim, undisturbed: Undisturbed, rank: int
) -> None:
    """Life after life, one rank is killed while it starts, trains, validates and commits."""
    for phase in PHASES:
        kill_rank(victim, phase, rank)
    check_end(victim, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "rank"), [("training", 1), ("commit", 0)])
def test_rank_that_stands_still_for_a_while_changes_nothing(
    victim: Victim, undisturbed: Undisturbed, phase: str, rank: int
) -> None:
    """SIGSTOP and SIGCONT seconds later: the run goes on without a restart and ends with the same bits."""
    pause_rank(victim, phase, rank, seconds=4)
    check_same(undisturbed(2), victim.home)


@pytest.mark.slow
def test_rank_that_stands_still_for_ever_ends_all(victim: Victim, undisturbed: Undisturbed) -> None:
    """The others wait as long as they were told, give up non-zero, and the next start has all that was committed."""
    freeze_rank(victim, "training", rank=1)
    freeze_rank(victim, "commit", rank=0)
    check_end(victim, undisturbed)


@pytest.mark.slow
def test_killed_loader_worker_ends_all_with_its_name(victim: Victim, undisturbed: Undisturbed) -> None:
    """The one rank whose loader worker was killed takes the others along; afterwards all goes on."""
    kill_loader_worker(victim)
    check_end(victim, undisturbed)


@pytest.mark.slow
def test_processes_do_not_outlive_torchrun(victim: Victim, undisturbed: Undisturbed) -> None:
    """torchrun killed by SIGKILL in any phase leaves no orphan behind, and what its processes then committed counts."""
    kill_launcher_at_once(victim)
    for phase in PHASES:
        kill_launcher(victim, phase)
    check_end(victim, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_restart_by_torchrun_is_a_resume(victim: Victim, undisturbed: Undisturbed, rank: int) -> None:
    """With --max-restarts, a killed rank costs no manual resume and changes no bit."""
    restart(victim, "commit", rank)
    check_same(undisturbed(2), victim.home)


@pytest.mark.slow
def test_signals_stop_all_ranks_at_the_same_step_and_lose_none(victim: Victim, undisturbed: Undisturbed) -> None:
    """Whoever gets which signal in whatever phase, once or twice: with enough time no step is lost."""
    for live in signal_scenarios(victim.nproc):
        live(victim)
    check_end(victim, undisturbed)


@pytest.mark.slow
def test_slow_commits_and_slow_reads_change_nothing(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Rank 0 dawdling in its commits and rank 1 in its reading on resume lead to the same bits."""
    slow = """
        import os
        import time

        from pipeline.components import WeightedLossEarlyStopper


        class Stopper(WeightedLossEarlyStopper):
            def save(self, folder):
                time.sleep(0.5)
                super().save(folder)

            def load(self, folder):
                time.sleep(2 * int(os.environ.get("RANK", "0")))
                super().load(folder)


        early_stopper = Stopper(max_epochs=8)
    """
    prepare(tmp_path, {"pymodules/early_stopper.py": slow})
    assert run_process(tmp_path, "--stop-after-epoch", "1", nproc=2).returncode == 0
    assert run_process(tmp_path, "--resume", nproc=2).returncode == 0
    check_same(undisturbed(2), tmp_path)


@pytest.mark.slow
def test_modules_used_in_another_order_than_registered_are_resumed_exactly(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """Heads are registered before the trunk that feeds them; from three ranks on, another order of summing shows."""
    prepare(tmp_path)
    victim = Victim(tmp_path, nproc=3)
    kill_rank(victim, "training", rank=2)
    kill_rank(victim, "commit", rank=0)
    check_end(victim, undisturbed)
