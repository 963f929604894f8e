"""The verbs `stop` and `logs`."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from pipeline.lifecycle.mode import inspect_results
from pipeline.monitoring.launch_record import record_launch
from pipeline.paths import ExperimentPaths
from pipeline.store import lock as lock_module
from pipeline.store.lock import RunLock, find_stop_file
from tests.support.experiments import tree
from tests.support.running import run_inside
from tests.support.verbs import call, held


@pytest.fixture
def paths(begun: Path) -> ExperimentPaths:
    """The tiny experiment, stopped after one epoch."""
    return ExperimentPaths(begun, "tiny")


@pytest.mark.parametrize("unit", ["step", "epoch"])
def test_stop_leaves_a_request(paths: ExperimentPaths, capsys: pytest.CaptureFixture[str], unit: str) -> None:
    """A live run finds in its claim what it is asked to finish first."""
    lock = RunLock(paths)
    lock.acquire()
    assert call(paths.home, "stop", "tiny", "--after", unit) == 0
    assert lock.claim.stop_file.read_text().strip() == unit
    lock.release()
    assert f"after the current {unit}" in capsys.readouterr().out


def test_stop_waits_for_the_end(paths: ExperimentPaths, capsys: pytest.CaptureFixture[str]) -> None:
    """With --wait the verb returns when the run has gone, and says how to go on."""
    with held(paths, partial(time.sleep, 0.3)):
        assert call(paths.home, "stop", "tiny", "--wait") == 0
    said = capsys.readouterr().out
    assert "tiny: stopped" in said
    assert "training_pipeline.py tiny" in said


def test_nothing_to_stop_is_told(paths: ExperimentPaths, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a run the verb refuses and writes nothing."""
    before = tree(paths.home)
    assert call(paths.home, "stop", "tiny") == 3
    assert "No run of 'tiny' is alive: it is unfinished." in capsys.readouterr().err
    assert call(paths.home, "stop", "tinny") == 2
    assert tree(paths.home) == before


def test_run_that_is_only_starting_cannot_be_asked(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before its first commit a run has nothing to keep: whoever wants it gone kills it."""
    paths = ExperimentPaths(home, "tiny")
    paths.error_files.mkdir(parents=True)
    record_launch(paths, 1)
    assert call(home, "stop", "tiny") == 3
    assert "kill -- -1" in capsys.readouterr().err


def test_run_that_is_only_starting_is_waited_for(paths: ExperimentPaths, capsys: pytest.CaptureFixture[str]) -> None:
    """With --wait a launched run is asked as soon as it is alive, and not before."""
    paths.error_files.mkdir(parents=True, exist_ok=True)
    record_launch(paths, os.getpid())

    def start_and_obey() -> None:
        time.sleep(0.8)
        paths.launch_file.unlink()
        with held(paths, partial(wait_for_request, paths)):
            return

    launched = threading.Thread(target=start_and_obey)
    launched.start()
    assert call(paths.home, "stop", "tiny", "--wait") == 0
    launched.join()
    assert "tiny: stopped" in capsys.readouterr().out


def wait_for_request(paths: ExperimentPaths) -> None:
    while not list(paths.temp_data.glob("claim_*/stop.request")):
        time.sleep(0.01)


def test_request_made_as_soon_as_a_run_is_alive_is_obeyed(
    paths: ExperimentPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever finds a run alive is heard by it, however little of its start it has behind it."""
    acquire = RunLock.acquire

    def acquire_and_be_asked(lock: RunLock) -> None:
        acquire(lock)
        assert call(paths.home, "stop", "tiny") == 0

    monkeypatch.setattr(RunLock, "acquire", acquire_and_be_asked)
    stood = inspect_results(paths).progress
    assert run_inside(paths.home, "--resume") == stood
    assert "(stop request)" in capsys.readouterr().out


def test_request_to_a_dead_run_is_not_obeyed_by_the_next(paths: ExperimentPaths) -> None:
    """A run that was killed before it saw its request takes it along."""
    (leave_claim(paths) / "stop.request").write_text("step")
    assert run_inside(paths.home, "--resume").is_finished


def leave_claim(paths: ExperimentPaths) -> Path:
    """Leave what a run leaves that was killed on this machine."""
    claim = paths.temp_data / "claim_dead"
    claim.mkdir()
    (claim / "owner.json").write_text(json.dumps({"host": socket.gethostname(), "pid": 1, "process": "gone 1"}))
    return claim


def test_claim_of_a_dead_run_takes_no_requests(paths: ExperimentPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that takes over has a claim of its own, and is not asked before it has."""
    monkeypatch.setattr(lock_module, "MAX_MISSED_HEARTBEATS", 0)
    leave_claim(paths)
    assert find_stop_file(paths) is None
    lock = RunLock(paths)
    lock.acquire()
    assert find_stop_file(paths) == lock.claim.stop_file
    lock.release()
    assert find_stop_file(paths) is None


def test_logs_shows_the_last_lines(paths: ExperimentPaths, capsys: pytest.CaptureFixture[str]) -> None:
    """The log itself goes to the output, its place beside it."""
    capsys.readouterr()
    assert call(paths.home, "logs", "tiny", "--lines", "2") == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == paths.log_file.read_text().splitlines()[-2:]
    assert str(paths.log_file) in shown.err


def test_following_shows_what_is_added_until_the_run_ends(
    paths: ExperimentPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    """A followed log goes on while a run is alive, also when its file is replaced."""

    def add_lines() -> None:
        time.sleep(0.5)
        with paths.log_file.open("a") as file:
            file.write("added\n")
        time.sleep(1)
        paths.log_file.unlink()
        paths.log_file.write_text("replaced\n")

    with held(paths, add_lines):
        assert call(paths.home, "logs", "tiny", "-f", "--lines", "0") == 0
    assert capsys.readouterr().out == "added\nreplaced\n"


def test_output_of_a_rank_is_found_where_torchrun_kept_it(
    paths: ExperimentPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    """The latest attempt counts, both streams of it."""
    folder = paths.torchrun_logs / "none_x/attempt_0/1"
    folder.mkdir(parents=True)
    (folder / "stdout.log").write_text("said\n")
    (folder / "stderr.log").write_text("complained\n")
    assert call(paths.home, "logs", "tiny", "--rank", "1") == 0
    assert "said\ncomplained\n" in capsys.readouterr().out
    assert call(paths.home, "logs", "tiny", "--rank", "4") == 2
    assert "there are ranks 1" in capsys.readouterr().err


def test_log_that_is_not_there_is_told(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An experiment that never ran has no log, and that is a state, not a crash."""
    assert call(home, "logs", "tiny") == 3
    assert "has no log" in capsys.readouterr().err


def test_launcher_speaks_where_the_run_could_not(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run in the background that failed before it had a log has told its launcher why."""
    paths = ExperimentPaths(home, "tiny")
    paths.error_files.mkdir(parents=True)
    paths.launcher_log.write_text("could not start\n")
    assert call(home, "logs", "tiny") == 0
    assert capsys.readouterr().out == "could not start\n"
