"""Being asked to stop: finish the step, commit, exit 0, and lose nothing."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.crash.campaign import check_same, prepare
from tests.support.running import BackgroundRun, run_inside, run_process, send

RESULTS = Path("experiment_results/tiny")
OTHERS = [pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)]


def step_of(home: Path) -> tuple[int, int]:
    try:
        progress = json.loads((home / RESULTS / "status.json").read_text())["progress"]
    except FileNotFoundError:
        return 0, 0
    return progress["epoch"], progress["step"]


@pytest.fixture
def homes(tmp_path: Path) -> tuple[Path, Path]:
    """The same slow experiment twice: one runs undisturbed, one is asked to stop."""
    for name in ("reference", "stopped"):
        prepare(tmp_path / name, checkpoint_every_steps=None)
    return tmp_path / "reference", tmp_path / "stopped"


@pytest.mark.parametrize("number", [signal.SIGTERM, *OTHERS])
def test_signal_commits_and_exits_zero(homes: tuple[Path, Path], number: int) -> None:
    """A single process that gets a signal ends with 0 in the middle of an epoch and resumes to the same bits."""
    reference, stopped = homes
    run_inside(reference)
    with BackgroundRun(stopped) as run:
        run.wait_for(lambda: step_of(stopped)[0] >= 1)
        send(run.process.pid, number)
        assert run.wait() == 0
        assert f"({signal.Signals(number).name})" in run.text()
    progress = json.loads((stopped / RESULTS / "state.json").read_text())["progress"]
    assert progress["stage"] != "finished"
    assert run_process(stopped, "--resume").returncode == 0
    check_same(reference, stopped)


def test_signal_to_one_rank_stops_all_at_the_same_step(homes: tuple[Path, Path]) -> None:
    """SIGTERM to the second of two processes: both commit the same step, exit 0, and torchrun returns 0."""
    reference, stopped = homes
    assert run_process(reference, nproc=2).returncode == 0
    with BackgroundRun(stopped, nproc=2) as run:
        run.wait_for(lambda: step_of(stopped)[0] >= 1)
        send(run.worker_pids()[1], signal.SIGTERM)
        assert run.wait() == 0, run.text()
    assert run_process(stopped, "--resume", nproc=2).returncode == 0
    check_same(reference, stopped)


@pytest.mark.parametrize("wanted", ["step", "epoch"])
@pytest.mark.slow
def test_stop_request_file_stops_cleanly(homes: tuple[Path, Path], wanted: str) -> None:
    """A request in the results folder ends the run with 0, at once or after the epoch, and only that run."""
    reference, stopped = homes
    run_inside(reference)
    with BackgroundRun(stopped) as run:
        run.wait_for(lambda: step_of(stopped)[0] >= 1)
        (stopped / RESULTS / "stop.request").write_text(wanted)
        assert run.wait() == 0
    progress = json.loads((stopped / RESULTS / "state.json").read_text())["progress"]
    assert progress["stage"] == "training"
    assert wanted == "step" or progress["step"] == 0
    assert run_process(stopped, "--resume").returncode == 0
    check_same(reference, stopped)


def test_second_interrupt_means_now(homes: tuple[Path, Path]) -> None:
    """Two SIGINTs end the run at once with a non-zero code; what was committed stays."""
    _, stopped = homes
    with BackgroundRun(stopped) as run:
        run.wait_for(lambda: step_of(stopped)[0] >= 1)
        send(run.process.pid, signal.SIGSTOP)
        send(run.process.pid, signal.SIGINT)
        send(run.process.pid, signal.SIGCONT)
        run.wait_for(lambda: True)
        send(run.process.pid, signal.SIGINT)
        code = run.wait()
    assert code in (0, 1)
    assert run_process(stopped, "--resume").returncode == 0


def test_orphaned_workers_end_by_themselves(homes: tuple[Path, Path]) -> None:
    """When torchrun is killed, its processes notice, commit and leave: no orphan stays."""
    _, stopped = homes
    with BackgroundRun(stopped, nproc=2) as run:
        run.wait_for(lambda: step_of(stopped)[0] >= 1)
        send(run.process.pid, signal.SIGKILL)
        run.process.wait(30)
        _wait_until_gone(run)
    assert json.loads((stopped / RESULTS / "state.json").read_text())["progress"]["epoch"] >= 1


def _wait_until_gone(run: BackgroundRun) -> None:
    limit = time.monotonic() + 30
    while run.pids():
        assert time.monotonic() < limit, run.text()
        time.sleep(0.1)
