"""Devices, with a stand-in for CUDA: no GPU is needed to choose one."""

from __future__ import annotations

import platform
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pipeline.errors import UsageError
from pipeline.system import accelerators
from pipeline.system.accelerators import (
    backend_of,
    bound_device,
    choose_device,
    cpu_model,
    device_identity,
    device_name,
    memory_in_mb,
    seed_accelerator,
    shared_device_error,
)

GPU = torch.device("cuda", 1)


def show_accelerator(monkeypatch: pytest.MonkeyPatch, kind: str, count: int) -> list[torch.device]:
    """Let torch see accelerators that are not there; returns the list of those that processes make their own."""
    devices: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "set_device_index", devices.append)
    return devices


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A machine with four GPUs."""
    return show_accelerator(monkeypatch, "cuda", 4)


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which torch sees no accelerator, and no variable hides one."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    for name in accelerators._VISIBILITY_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("local_rank", [0, 3])
def test_local_rank_chooses_the_gpu(
    chosen: list[torch.device], monkeypatch: pytest.MonkeyPatch, local_rank: int
) -> None:
    """On every machine the first process takes the first GPU, whatever its rank among all is."""
    for name, value in {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": 4, "RANK": 4 + local_rank}.items():
        monkeypatch.setenv(name, str(value))
    assert choose_device().device == torch.device("cuda", local_rank)
    assert chosen == [torch.device("cuda", local_rank)]


def test_one_process_takes_the_first_gpu(chosen: list[torch.device]) -> None:
    """Without torchrun there is no local rank."""
    assert choose_device().device == torch.device("cuda", 0)


def test_process_that_sees_one_device_takes_it_whatever_its_local_rank_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun --virtual-local-rank, or Slurm, may give every process one device of its own."""
    show_accelerator(monkeypatch, "cuda", 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for local_rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        assert choose_device().device == torch.device("cuda", 0)


def test_refusal_of_a_shared_device_names_both_numbers(
    chosen: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remedy is a line that works."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    message = str(shared_device_error())
    assert "5 processes on this machine need 5 accelerators, but 4 can be seen" in message
    assert "CUDA_VISIBLE_DEVICES is '0,1,2,3'" in message
    assert "torchrun --nproc-per-node=4" in message


@pytest.mark.parametrize("kind", ["mps", "hpu", "mtia"])
def test_unsupported_accelerator_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A run must not take hours on the CPU because its device is silently not used."""
    show_accelerator(monkeypatch, kind, 1)
    with pytest.raises(UsageError, match=f"accelerator of type {kind}, which is not supported.*\n.*--device cpu"):
        choose_device()
    assert choose_device("cpu").device.type == "cpu"


def test_cpu_can_be_asked_for(chosen: list[torch.device]) -> None:
    """The GPU is not touched then, and the first lines of the run say why."""
    assert choose_device("cpu") == accelerators.ChosenDevice(torch.device("cpu"), "--device cpu")
    assert chosen == []


@pytest.mark.parametrize("wanted", ["xpu", "gpu", "cuda:1"])
def test_device_that_is_not_there_is_refused(chosen: list[torch.device], wanted: str) -> None:
    """The message names what torch sees."""
    with pytest.raises(UsageError, match=f"torch sees, which is cuda, but it is '{wanted}'"):
        choose_device(wanted)


@pytest.mark.parametrize(
    ("variables", "drivers", "expected"),
    [
        ({}, [], ""),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ["NVIDIA"], "CUDA_VISIBLE_DEVICES='-1' hides accelerators"),
        ({}, ["NVIDIA"], f"torch {torch.__version__} cannot use the NVIDIA GPU of this machine"),
    ],
    ids=["no GPU", "hidden GPU", "torch for CPUs only"],
)
def test_reason_for_a_cpu_is_given(
    hidden: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variables: dict[str, str],
    drivers: list[str],
    expected: str,
) -> None:
    """It must not take a day to find out that the GPU is idle."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "NVIDIA").write_text("") if drivers else None
    monkeypatch.setattr(accelerators, "_DRIVER_FILES", {"NVIDIA": tmp_path / "NVIDIA"})
    assert choose_device() == accelerators.ChosenDevice(torch.device("cpu"), expected)


def test_cpu_is_shared_and_gpus_have_identities(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is identified by its UUID; where there is none, by what the process sees."""
    properties = SimpleNamespace(uuid="GPU-1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert device_identity(torch.device("cpu")) == ""
    assert device_identity(GPU).endswith(" GPU-1")
    del properties.uuid
    assert device_identity(GPU).endswith(" cuda:1")


def test_machine_without_gpus_works_on_its_cpu(hidden: None) -> None:
    """Then gloo is all that is needed, and nothing is bound to a device."""
    device = choose_device().device
    assert (device.type, backend_of(device), bound_device(device)) == ("cpu", "gloo", None)


def test_accelerator_is_seeded_only_where_it_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader worker is forked: there the accelerator is not initialised, and must stay so."""
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)
    monkeypatch.setattr(accelerators, "_accelerator_module", lambda: torch.cuda)
    for is_initialized in (False, True):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda answer=is_initialized: answer)
        seed_accelerator(3)
    assert seeds == [3]


def test_gpus_talk_through_nccl_and_small_messages_through_gloo() -> None:
    """The process group knows the GPU from the start."""
    assert (backend_of(GPU), bound_device(GPU)) == ("cpu:gloo,cuda:nccl", GPU)


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
    monkeypatch.setattr("pipeline.system.accelerators._CPU_INFO", file)
    assert device_name(torch.device("cpu")) == cpu_model() == expected


def test_cpu_without_a_list_of_its_cores_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other systems than Linux do not have the file."""
    monkeypatch.setattr("pipeline.system.accelerators._CPU_INFO", tmp_path / "none")
    monkeypatch.setattr(platform, "processor", lambda: "")
    assert cpu_model() == platform.machine()


def test_memory_is_that_of_this_process() -> None:
    """On a CPU the resident memory is reported in megabytes."""
    assert 10 < memory_in_mb(torch.device("cpu")) < 100_000


def test_gpus_of_other_makers_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """XPU is supported like CUDA, with its own backend."""
    show_accelerator(monkeypatch, "xpu", 2)
    assert choose_device().device == torch.device("xpu", 0)
    assert backend_of(torch.device("xpu", 0)) == "cpu:gloo,xpu:xccl"


def test_devices_without_uuids_differ_by_what_processes_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun --virtual-local-rank shows each process one device, which all of them call number 0."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    identities = set[str]()
    for visible in ("0", "1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        identities.add(device_identity(torch.device("cuda", 0)))
    assert len(identities) == 2
