"""Devices, with a stand-in for CUDA: no GPU is needed to choose one."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from pipeline.errors import UsageError
from pipeline.runtime.accelerators import backend_of, bound_device, choose_device, cpu_model, device_name, memory_in_mb


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A machine with four GPUs; returns the list of those that processes make their own."""
    devices: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    return devices


@pytest.mark.parametrize("local_rank", [0, 3])
def test_local_rank_chooses_the_gpu(
    chosen: list[torch.device], monkeypatch: pytest.MonkeyPatch, local_rank: int
) -> None:
    """On every machine the first process takes the first GPU, whatever its rank among all is."""
    for name, value in {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": 4, "RANK": 4 + local_rank}.items():
        monkeypatch.setenv(name, str(value))
    assert choose_device() == torch.device("cuda", local_rank)
    assert chosen == [torch.device("cuda", local_rank)]


def test_one_process_takes_the_first_gpu(chosen: list[torch.device]) -> None:
    """Without torchrun there is no local rank."""
    assert choose_device() == torch.device("cuda", 0)


def test_more_processes_than_gpus_are_refused(chosen: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both numbers are told, before any GPU is taken."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UsageError, match="5 processes on this machine need 5 GPUs, but 4 can be seen"):
        choose_device()
    assert chosen == []


def test_machine_without_gpus_works_on_its_cpu() -> None:
    """Then gloo is all that is needed, and nothing is bound to a device."""
    device = choose_device()
    assert (device.type, backend_of(device), bound_device(device)) == ("cpu", "gloo", None)


def test_gpus_talk_through_nccl_and_small_messages_through_gloo() -> None:
    """The process group knows the GPU from the start."""
    device = torch.device("cuda", 1)
    assert (backend_of(device), bound_device(device)) == ("cpu:gloo,cuda:nccl", device)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "processor\t: 0\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n\nmodel name\t: other\n",
            "AMD EPYC (cpu family 26, model 2)",
        ),
        ("model name: X 3000: fast\n", "X 3000: fast"),
        (
            "CPU implementer\t: 0x41\nCPU part\t: 0xd40\n",
            f"{platform.machine()} (CPU implementer 0x41, CPU part 0xd40)",
        ),
        ("", platform.machine()),
    ],
    ids=["x86", "name alone", "ARM", "nothing"],
)
def test_cpu_is_known_by_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str) -> None:
    """Name and numbers of the first core; the architecture alone only where there is nothing else."""
    file = tmp_path / "cpuinfo"
    file.write_text(text)
    monkeypatch.setattr("pipeline.runtime.accelerators._CPU_INFO", file)
    assert device_name(torch.device("cpu")) == cpu_model() == expected


def test_cpu_without_a_list_of_its_cores_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other systems than Linux do not have the file."""
    monkeypatch.setattr("pipeline.runtime.accelerators._CPU_INFO", tmp_path / "none")
    monkeypatch.setattr(platform, "processor", lambda: "")
    assert cpu_model() == platform.machine()


def test_memory_is_that_of_this_process() -> None:
    """On a CPU the resident memory is told in megabytes."""
    assert 10 < memory_in_mb(torch.device("cpu")) < 100_000
