"""GPUs as listed by nvidia-smi, with a stand-in for the driver's tool."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from pipeline.errors import UsageError
from pipeline.system import nvidia_smi
from pipeline.system.nvidia_smi import look_at_gpus, num_visible, parse_devices

TWO = "echo '0, NVIDIA A100, 83, 30000, 40960'; echo '1, NVIDIA A100, [N/A], 12, 40960'"


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file to write a stand-in for nvidia-smi to; nothing else of that name is found."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "nvidia-smi"


def write_driver(driver: Path, script: str) -> None:
    driver.write_text(f"#!/bin/sh\n{script}\n")
    driver.chmod(0o755)


def test_gpus_are_listed_with_load_and_memory(driver: Path) -> None:
    """Each GPU is one line; what the driver does not know is a question mark."""
    write_driver(driver, TWO)
    gpus, problem = look_at_gpus()
    assert [str(gpu) for gpu in gpus] == [
        "0 NVIDIA A100: 83 %, 31.5 of 42.9 GB",
        "1 NVIDIA A100: ?, 0.0 of 42.9 GB",
    ]
    assert problem == ""


def test_machine_without_driver_has_no_gpus(driver: Path) -> None:
    """A missing tool is not reported as a problem."""
    assert look_at_gpus() == ([], "")


def test_failing_driver_is_quoted(driver: Path) -> None:
    """What the tool complains of is passed on."""
    write_driver(driver, "echo 'NVML: Driver/library version mismatch' >&2; exit 9")
    assert look_at_gpus() == ([], "nvidia-smi failed: NVML: Driver/library version mismatch")


def test_hanging_driver_is_given_up(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that hangs, as broken ones do, is not waited for longer than the limit."""
    write_driver(driver, "exec sleep 60")
    assert look_at_gpus(0.3)[1] == "nvidia-smi did not answer within 0.3 seconds"


@pytest.mark.parametrize(("allowed", "count"), [(None, 2), ("1", 1), ("", 0), ("-1", 0), ("0,1,2", 2)])
def test_visible_gpus_are_the_allowed(driver: Path, monkeypatch: pytest.MonkeyPatch, allowed: str, count: int) -> None:
    """CUDA_VISIBLE_DEVICES hides GPUs and cannot add any."""
    write_driver(driver, TWO)
    if allowed is not None:
        monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", allowed)
    assert num_visible() == count


def test_gpus_that_cannot_be_counted_are_not_taken_for_none(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silently launching one process on eight GPUs would waste a night; hidden GPUs need not be counted."""
    monkeypatch.setattr(nvidia_smi, "SECONDS_TO_COUNT", 0.3)
    write_driver(driver, "exec sleep 60")
    with pytest.raises(UsageError, match=r"did not answer within 0.3 seconds.\n  fix: .*--nproc N"):
        num_visible()
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "-1")
    assert num_visible() == 0


def test_slow_driver_is_waited_for_when_processes_are_counted(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A status table does not wait as long as a launch does."""
    monkeypatch.setattr(nvidia_smi, "SECONDS_TO_COUNT", 20)
    write_driver(driver, f"sleep 0.5; {TWO}")
    assert num_visible() == 2


def test_other_accelerators_are_counted_by_torch(driver: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """AMD's and Intel's have no nvidia-smi."""
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(nvidia_smi, "_OTHER_DRIVERS", ())
    assert num_visible() == 0
    monkeypatch.setattr(nvidia_smi, "_OTHER_DRIVERS", (tmp_path,))
    assert num_visible() == 4


@pytest.mark.parametrize(("text", "devices"), [("0", [0]), ("0-3", [0, 1, 2, 3]), ("0,2,5-6", [0, 2, 5, 6])])
def test_devices_are_numbers_and_ranges(text: str, devices: list[int]) -> None:
    """GPUs are written the way people write pages."""
    assert parse_devices(text) == devices


@pytest.mark.parametrize("text", ["", "a", "3-1", "0,0", "0-", "-1", "0-2,1"])
def test_malformed_devices_are_refused(text: str) -> None:
    """Anything else is refused with what was given."""
    with pytest.raises(UsageError, match="GPUs"):
        parse_devices(text)


def test_counting_waits_long_enough_and_knows_other_drivers() -> None:
    """nvidia-smi takes seconds on nodes with many GPUs; AMD's driver has a device of its own."""
    assert nvidia_smi.SECONDS_TO_COUNT >= 20
    assert Path("/dev/kfd") in nvidia_smi._OTHER_DRIVERS
