"""The device of a process: which one, how ranks communicate through it, its seed, waits, name and memory.

Whatever differs between kinds of accelerators is in this module. The rest of the code knows at most whether a device is
the CPU.
"""

from __future__ import annotations

import os
import platform
import resource
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import torch

from pipeline.errors import UsageError

CPU = torch.device("cpu")
# The kinds of accelerators that can be used, and the backends of their process groups. Messages between hosts always
# take gloo. ROCm calls its devices cuda, and its library nccl.
BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}
# Variables that hide devices from a process.
_VISIBILITY_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
# Files of drivers: where one of them exists, the machine has an accelerator, whether torch can use it or not.
_DRIVER_FILES = {"NVIDIA": Path("/dev/nvidiactl"), "AMD": Path("/dev/kfd")}
_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class ChosenDevice:
    """The device of this process, and why it is the CPU, where that is worth saying."""

    device: torch.device
    reason: str = ""


def choose_device(wanted: str | None = None) -> ChosenDevice:
    """Return the accelerator of this process, by its local rank, or the CPU if there is none or ``wanted`` says so."""
    if wanted == "cpu":
        return ChosenDevice(CPU, "--device cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if wanted is not None and (accelerator is None or wanted != accelerator.type):
        found = "none" if accelerator is None else accelerator.type
        raise UsageError(
            f"--device must be cpu or the accelerator that torch sees, which is {found}, but it is {wanted!r}.",
            "leave --device out, or use --device cpu",
        )
    if accelerator is None:
        return ChosenDevice(CPU, _reason_for_cpu())
    if accelerator.type not in BACKENDS:
        raise UsageError(
            f"This machine has an accelerator of type {accelerator.type}, which is not supported; supported are CUDA "
            "(NVIDIA and ROCm) and XPU.",
            "--device cpu trains on the CPU",
        )
    # Where a launcher gives every process one device of its own, all local ranks are 0, or higher than the one device.
    # Processes that really share one are found when they have met.
    device = torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device)
    return ChosenDevice(device)


def _reason_for_cpu() -> str:
    hiding = [f"{name}={os.environ[name]!r}" for name in _VISIBILITY_VARIABLES if name in os.environ]
    if hiding:
        return f"{' and '.join(hiding)} hides accelerators"
    makers = [maker for maker, path in _DRIVER_FILES.items() if path.exists()]
    if makers:
        return f"torch {torch.__version__} cannot use the {' and '.join(makers)} GPU of this machine"
    return ""


def device_identity(device: torch.device) -> str:
    """Return what distinguishes a device from all others on all machines; empty for a CPU, which ranks may share."""
    if device == CPU:
        return ""
    properties = torch.get_device_module(device).get_device_properties(device)
    number = getattr(properties, "uuid", None) or f"{_visible_devices()} {device}"
    return f"{socket.gethostname()} {number}"


def shared_device_error() -> UsageError:
    """Return the refusal of more processes on a machine than it has devices for."""
    num_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    num_devices = torch.accelerator.device_count()
    return UsageError(
        f"{num_processes} processes on this machine need {num_processes} accelerators, but {num_devices} can be seen; "
        f"{_visible_devices()}.",
        f"torchrun --nproc-per-node={num_devices} …, or --device cpu, or let CUDA_VISIBLE_DEVICES name more",
    )


def _visible_devices() -> str:
    chosen = [f"{name} is {os.environ[name]!r}" for name in _VISIBILITY_VARIABLES if name in os.environ]
    return ", ".join(chosen) or "CUDA_VISIBLE_DEVICES is not set"


def backend_of(device: torch.device) -> str:
    """Return the backend of the process group: gloo for messages of hosts, the device's own for its tensors."""
    return BACKENDS.get(device.type, "gloo")


def bound_device(device: torch.device) -> torch.device | None:
    """Return the device that a process group is bound to; NCCL would otherwise guess it at the first message."""
    return device if device.type == "cuda" else None


def seed_accelerator(seed: int) -> None:
    """Set the generator of this process's accelerator, if it uses one; asking earlier would take memory on it."""
    module = _accelerator_module()
    # In a forked loader worker the accelerator is not initialised, and must not be.
    if module is not None and module.is_initialized():
        module.manual_seed(seed)


@lru_cache(maxsize=1)
def _accelerator_module() -> ModuleType | None:
    accelerator = torch.accelerator.current_accelerator()
    return torch.get_device_module(accelerator) if accelerator is not None and accelerator.type in BACKENDS else None


def constant(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """Return numbers as a tensor of a device; created on the device, they would be copied while the host waits."""
    return torch.tensor(values, dtype=torch.float32, pin_memory=device != CPU).to(device, non_blocking=True)


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return host memory for a tensor's values; page-locked if they come from an accelerator."""
    return torch.empty_like(tensor, device=CPU, pin_memory=tensor.device != CPU)


def wait_for_copies(sources: list[torch.Tensor]) -> None:
    """Wait until what is being copied from an accelerator into host memory has arrived."""
    if any(source.device != CPU for source in sources):
        torch.accelerator.synchronize()


def has_fused_kernels(device: torch.device) -> bool:
    """Return whether torch's fused optimizers run on a device."""
    return device == CPU or device.type in BACKENDS


def device_name(device: torch.device) -> str:
    if device == CPU:
        return cpu_model()
    return str(torch.get_device_module(device).get_device_name(device))


def cpu_model() -> str:
    """Return the model of this machine's CPU; where only the architecture is known, that."""
    fields: dict[str, str] = {}
    try:
        for line in _CPU_INFO.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    except OSError:
        # Only Linux has the file; there, platform.processor() is empty.
        return platform.processor() or platform.machine()
    # Virtual machines shorten the name, such as to "AMD EPYC"; ARM has no name. The numbers distinguish generations.
    numbers = [
        f"{name} {fields[name]}" for name in ("cpu family", "model", "CPU implementer", "CPU part") if name in fields
    ]
    name = fields.get("model name", "") or platform.machine()
    return f"{name} ({', '.join(numbers)})" if numbers else name


def memory_in_mb(device: torch.device) -> int:
    """Return the peak memory of this process: allocated on its accelerator, or resident on a CPU."""
    if device == CPU:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return int(torch.accelerator.max_memory_allocated(device)) >> 20
