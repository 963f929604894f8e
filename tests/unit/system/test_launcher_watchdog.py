"""A torchrun that cannot end itself, with a process that sleeps in its place."""

from __future__ import annotations

import subprocess

import pytest

from pipeline.system import launcher_watchdog
from pipeline.system.launcher_watchdog import main, may_start_again, process_mark


def test_launcher_that_stays_is_killed(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """After its time to leave it is ended, and the output says so."""
    monkeypatch.setattr(launcher_watchdog, "SECONDS_TO_LEAVE", 0)
    with subprocess.Popen(["sleep", "60"]) as launcher:
        main(launcher.pid, str(process_mark(launcher.pid)))
        assert launcher.wait() == -9
    assert "waits for a machine that is gone" in capfd.readouterr().err


def test_other_process_with_its_number_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark distinguishes the launcher from a later process with the same number."""
    monkeypatch.setattr(launcher_watchdog, "SECONDS_TO_LEAVE", 0)
    with subprocess.Popen(["sleep", "60"]) as other:
        main(other.pid, "mark of another")
        assert other.poll() is None
        other.kill()


@pytest.mark.parametrize(("most", "so_far", "expected"), [("0", "0", False), ("3", "0", True), ("3", "3", False)])
def test_launcher_with_restarts_left_may_wait(
    monkeypatch: pytest.MonkeyPatch, most: str, so_far: str, expected: bool
) -> None:
    """It starts its processes again when the machine is back."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", most)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", so_far)
    assert may_start_again() is expected
