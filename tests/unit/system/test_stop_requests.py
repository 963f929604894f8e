"""Requests to stop: signals, a request file, and the death of the launcher; and limits in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.system import stop_requests
from pipeline.system.stop_requests import StopRequests, TimeLimit, ignore_stop_signals


@pytest.fixture
def requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StopRequests:
    """Stop requests that look at the disk every time they are asked."""
    monkeypatch.setattr(stop_requests, "SECONDS_BETWEEN_LOOKS", 0.0)
    return StopRequests(tmp_path / "stop.request", has_launcher=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signal_is_a_request_with_its_name(requests: StopRequests, number: signal.Signals) -> None:
    """A signal only sets a flag; the training decides where to stop."""
    requests.listen()
    assert not requests.asked()
    signal.raise_signal(number)
    assert requests.asked()
    assert requests.reason == number.name


def test_second_interrupt_means_now(requests: StopRequests) -> None:
    """A user who presses Ctrl+C twice does not want to wait for the step."""
    requests.listen()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_other_signal_may_come_twice(requests: StopRequests, number: signal.Signals) -> None:
    """Schedulers repeat their signals; the step is finished all the same."""
    requests.listen()
    signal.raise_signal(number)
    signal.raise_signal(number)
    assert requests.reason == number.name


def test_interrupt_after_a_scheduler_signal_waits_for_the_step(requests: StopRequests) -> None:
    """The first SIGINT is a request, whatever came before it."""
    requests.listen()
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    assert requests.asked()


def test_signal_while_the_stop_file_is_read_is_kept(requests: StopRequests, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler may run at any point; the reading that it interrupts must not overwrite its request."""

    def read_interrupted(path: Path) -> bytes:
        signal.raise_signal(signal.SIGTERM)
        raise FileNotFoundError(path)

    monkeypatch.setattr(stop_requests, "read_regular", read_interrupted)
    requests.listen()
    assert requests.asked()
    assert requests.reason == "SIGTERM"


def test_without_a_reason_there_is_no_request(requests: StopRequests) -> None:
    """Without signal and file the training continues."""
    assert not requests.asked()
    assert not requests.asked(epoch_ends=True)


def test_stop_file_stops_at_the_step(requests: StopRequests, tmp_path: Path) -> None:
    """A request for the step is heard at the next step."""
    (tmp_path / "stop.request").write_text("step\n")
    assert requests.asked()
    assert requests.reason == "stop request"


def test_stop_file_may_wait_for_the_epoch(requests: StopRequests, tmp_path: Path) -> None:
    """A request for the epoch is not heard before the epoch ends."""
    (tmp_path / "stop.request").write_text("epoch\n")
    assert not requests.asked()
    assert requests.asked(epoch_ends=True)


@pytest.mark.parametrize("kind", ["pipe", "folder", "bytes"])
def test_unusual_stop_file_neither_hangs_nor_crashes(requests: StopRequests, tmp_path: Path, kind: str) -> None:
    """A pipe or a folder is not a request, and a file of any content is one."""
    path = tmp_path / "stop.request"
    {"pipe": lambda: os.mkfifo(path), "folder": path.mkdir, "bytes": lambda: path.write_bytes(b"\xff")}[kind]()
    assert requests.asked() == (kind == "bytes")


def test_disk_is_looked_at_once_a_second(tmp_path: Path) -> None:
    """Fast steps do not ask the file system each time, but the end of an epoch does."""
    requests = StopRequests(tmp_path / "stop.request", has_launcher=False)
    (tmp_path / "stop.request").write_text("step")
    assert not requests.asked()
    assert requests.asked(epoch_ends=True)


def test_death_of_the_launcher_is_a_request(requests: StopRequests, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose torchrun has gone stops instead of living on as an orphan."""
    requests = StopRequests(None, has_launcher=True)
    assert not requests.asked()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert requests.asked()
    assert requests.reason == "the launcher is gone"


def test_process_without_launcher_may_change_its_parent(
    requests: StopRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run started by nohup survives the shell that started it."""
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert not requests.asked()


def test_rank_without_stop_file_does_not_look_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rank zero reads the request file."""
    monkeypatch.setattr(stop_requests, "SECONDS_BETWEEN_LOOKS", 0.0)
    assert not StopRequests(None, has_launcher=False).asked(epoch_ends=True)


def test_loader_worker_ignores_stop_signals() -> None:
    """Ctrl+C reaches every process of a terminal; workers leave the answer to their trainer."""
    ignore_stop_signals()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.raise_signal(number)
        assert signal.getsignal(number) == signal.SIG_IGN


def test_time_limit_interrupts_what_takes_too_long() -> None:
    """The error that the caller names is raised inside the block."""
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="too slow"), TimeLimit(0.05, lambda: TimeoutError("too slow")):
        time.sleep(5)
    assert time.monotonic() - started < 2


def test_time_limit_ends_with_its_block() -> None:
    """Nothing is raised afterwards, and the handler of before is back."""
    before = signal.getsignal(signal.SIGALRM)
    with TimeLimit(0.05, lambda: TimeoutError("too slow")):
        pass
    time.sleep(0.1)
    assert signal.getsignal(signal.SIGALRM) == before


@pytest.mark.parametrize("seconds_to_begin", [0, 1])
def test_process_does_not_outlive_its_launcher(seconds_to_begin: int) -> None:
    """Even before it listens for stop requests, or asks who its launcher is, a process without one is soon gone."""
    watch = "from pipeline.system.stop_requests import end_with_launcher; end_with_launcher()"
    child = f"import time; time.sleep({seconds_to_begin}); {watch}; time.sleep(60)"
    launcher = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {child!r}]).pid, flush=True)"
    # The pipe stays open for as long as anyone is alive who has inherited it.
    waiting = subprocess.Popen([sys.executable, "-c", f"{launcher}; sys.stdin.read()"], stdin=-1, stdout=-1, text=True)
    assert waiting.stdout is not None
    waiting.stdout.readline()
    time.sleep(0.5)
    waiting.kill()
    waiting.communicate(timeout=30)
