"""Runs that helper verbs start: under a real torchrun, here and in the background."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.monitoring.experiment_state import LIVE, NEW, read_experiment_state, read_overview, state_of
from pipeline.paths import ExperimentPaths
from pipeline.store.compare import first_difference
from tests.support.experiments import write_experiment
from tests.support.running import SECONDS, BackgroundRun, environment, run_process

SLOW = {"training": {"checkpoint_every_steps": 1}, "data_loading": {"step_min_items": 4}}


@pytest.fixture
def home(launching_home: Path) -> Path:
    """A data home with two experiments."""
    for name in ("tiny", "second"):
        write_experiment(launching_home, name)
    return launching_home


def verb(home: Path, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Call a verb in a process of its own; what stands behind ``--`` stays last."""
    own, dashes, flags = " ".join(words).partition(" -- ")
    line = [sys.executable, "-m", "pipeline", *own.split(), "--data-home", str(home), *dashes.split(), *flags.split()]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0 or not check, done.stderr
    return done


def wait_until_over(*everyone: ExperimentPaths) -> None:
    limit = time.monotonic() + SECONDS
    while any(state_of(paths) in (*LIVE, NEW) for paths in everyone):
        assert time.monotonic() < limit, [paths.launcher_log.read_text() for paths in everyone]
        time.sleep(0.2)


def test_run_in_front_trains_to_the_end(home: Path) -> None:
    """`run` becomes torchrun: its output and its exit code; other ranks keep theirs in files."""
    done = verb(home, "run", "tiny", "--nproc", "2")
    assert "finished after" in done.stdout
    paths = ExperimentPaths(home, "tiny")
    assert [path.parent.name for path in paths.torchrun_logs.rglob("stdout.log")] == ["1"]
    assert state_of(paths) == "finished"


def test_run_in_the_background_is_followed_and_stopped(home: Path) -> None:
    """A detached run is seen from its first moment, can be followed, and stops cleanly when asked."""
    write_experiment(home, "slow", files={"pymodules/early_stopper.py": ENDLESS}, **SLOW)
    paths = ExperimentPaths(home, "slow")
    verb(home, "run", "slow", "--nproc", "2", "--detach")
    assert state_of(paths) in LIVE
    limit = time.monotonic() + SECONDS
    while getattr(read_experiment_state(paths).status.progress, "epoch", 0) < 1:
        assert time.monotonic() < limit, paths.launcher_log.read_text()
        time.sleep(0.2)
    assert "asked to stop" in verb(home, "stop", "slow", "--wait").stdout
    assert "stopped at" in verb(home, "logs", "slow").stdout
    assert read_overview(paths).ended.outcome == "stopped"


ENDLESS = """
    from pipeline.components import WeightedLossEarlyStopper

    early_stopper = WeightedLossEarlyStopper(max_epochs=1000)
"""


@pytest.mark.slow
def test_stage_two_starts_when_stage_one_has_finished(home: Path) -> None:
    """Two stages follow one another without anyone waiting, and give what each gives alone."""
    first, second = ExperimentPaths(home, "tiny"), ExperimentPaths(home, "second")
    verb(home, "launch", "tiny", "then", "second", "--nproc", "2")
    assert state_of(second) == "waiting"
    wait_until_over(first, second)
    assert (state_of(first), state_of(second)) == ("finished", "finished")
    assert first_difference(first.data, second.data) is None


@pytest.mark.slow
def test_stage_two_does_not_start_after_a_failure(home: Path) -> None:
    """If the first stage did not finish, the second is left alone, and the log says so."""
    first = ExperimentPaths(home, "tiny")
    verb(home, "launch", "tiny", "then", "second", "--", "--auto", "--stop-after-epoch", "1")
    wait_until_over(first)
    limit = time.monotonic() + SECONDS
    while "tiny has not finished, so second is not started" not in first.launcher_log.read_text():
        assert time.monotonic() < limit
        time.sleep(0.2)
    assert state_of(ExperimentPaths(home, "second")) == "new"


@pytest.mark.slow
def test_experiments_side_by_side_do_not_disturb_each_other(home: Path) -> None:
    """Two that were launched and two torchruns by hand end as one alone does; a crash of a fifth harms none of them."""
    write_experiment(home, "broken", files={"pymodules/module_transforms/b.py": RAISES})
    for name in ("by_hand", "by_hand_too", "alone"):
        write_experiment(home, name)
    tiny, second, broken = launched = [ExperimentPaths(home, name) for name in ("tiny", "second", "broken")]
    with (
        BackgroundRun(home, name="by_hand", nproc=2) as first,
        BackgroundRun(home, name="by_hand_too", nproc=2) as other,
    ):
        verb(home, "launch", "tiny:0,1", "second:2,3", "broken:4")
        assert [first.wait(), other.wait()] == [0, 0], first.text() + other.text()
    wait_until_over(*launched)
    assert [state_of(paths) for paths in launched] == ["finished", "finished", "unfinished"]
    assert "no such column" in read_overview(broken).ended.errors[0].error
    assert run_process(home, name="alone", nproc=2).returncode == 0
    alone, *by_hand = (ExperimentPaths(home, name) for name in ("alone", "by_hand", "by_hand_too"))
    assert [first_difference(alone.data, paths.data) for paths in (tiny, second, *by_hand)] == [None] * 4


RAISES = """
    from . import a

    loss_registers = ["loss_b", "error"]


    class ModuleTransform(a.ModuleTransform):
        def __call__(self, batch, modules):
            raise ValueError("no such column")
"""
