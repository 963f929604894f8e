"""Being asked to stop: finish the step, commit, exit 0, and lose nothing."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.crash.experiment import check_same, prepare
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


@pytest.mark.parametrize("wanted", ["step", "epoch"])
@pytest.mark.slow
def test_stop_request_file_stops_cleanly(homes: tuple[Path, Path], wanted: str) -> None:
    """A request in the claim of a run ends the run with 0, at once or after the epoch, and only that run."""
    reference, stopped = homes
    run_inside(reference)
    with BackgroundRun(stopped) as run:
        run.wait_for(lambda: step_of(stopped)[0] >= 1)
        (claim,) = (stopped / RESULTS / "temp_data").glob("claim_*")
        (claim / "stop.request").write_text(wanted)
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
