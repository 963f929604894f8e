"""The device of a process: its choice, process-group backend, seed, synchronization, name and memory.

What torch needs to know of a kind of accelerator is in this module; the rest of the code only distinguishes the CPU
from other devices. Library versions that bits depend on are in ``distributed/hardware.py``; devices are counted and
chosen before torch is imported in ``nvidia_smi.py`` and ``launch/torchrun_command.py``.
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
# The supported kinds of accelerators and the backends of their process groups. Tensors in host memory always travel
# through gloo. ROCm is included: torch calls its devices cuda and its library nccl.
BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}
# Environment variables that hide devices from a process.
_VISIBILITY_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
# Device files of drivers. If one exists, the machine has a GPU, even if this build of torch cannot use it.
_DRIVER_FILES = {"NVIDIA": Path("/dev/nvidiactl"), "AMD": Path("/dev/kfd")}
_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class ChosenDevice:
    """The device of this process; ``reason`` says why it is the CPU although there may be a GPU."""

    device: torch.device
    reason: str = ""


def choose_device(wanted: str | None = None) -> ChosenDevice:
    """Return the accelerator that belongs to this local rank, or the CPU if there is none or ``wanted`` is cpu."""
    if wanted == "cpu":
        return ChosenDevice(CPU, "--device cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if wanted is not None and (accelerator is None or wanted != accelerator.type):
        visible = "none" if accelerator is None else accelerator.type
        raise UsageError(
            f"--device must be cpu or the accelerator that torch sees, which is {visible}, but it is {wanted!r}.",
            "leave --device out, or use --device cpu",
        )
    if accelerator is None:
        return ChosenDevice(CPU, _find_reason_for_cpu())
    if accelerator.type not in BACKENDS:
        # Refused instead of falling back: a run must not take days on the CPU because a device is silently not used.
        raise UsageError(
            f"This machine has an accelerator of type {accelerator.type}, which is not supported; supported are CUDA "
            "(NVIDIA and ROCm) and XPU.",
            "--device cpu trains on the CPU",
        )
    # Modulo, because a launcher may show each process a single device, of index 0 whatever the local rank is.
    # Processes that really share a device are detected after the rendezvous (``device_identity``).
    device = torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device)
    return ChosenDevice(device)


def _find_reason_for_cpu() -> str:
    """Return why torch sees no accelerator if this may be a mistake; empty on a machine without one."""
    hiding = [f"{name}={os.environ[name]!r}" for name in _VISIBILITY_VARIABLES if name in os.environ]
    if hiding:
        return f"{' and '.join(hiding)} hides accelerators"
    makers = [maker for maker, path in _DRIVER_FILES.items() if path.exists()]
    if makers:
        return f"torch {torch.__version__} cannot use the {' and '.join(makers)} GPU of this machine"
    return ""


def device_identity(device: torch.device) -> str:
    """Return an identifier that is unique over all machines; empty for a CPU, which ranks may share."""
    if device == CPU:
        return ""
    properties = torch.get_device_module(device).get_device_properties(device)
    # Not every backend has UUIDs. An index alone is ambiguous: each process numbers only the devices it can see.
    identifier = getattr(properties, "uuid", None) or f"{_describe_visibility()} {device}"
    return f"{socket.gethostname()} {identifier}"


def shared_device_error() -> UsageError:
    """Return the error for more processes on this machine than visible accelerators."""
    num_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    num_devices = torch.accelerator.device_count()
    return UsageError(
        f"{num_processes} processes on this machine need {num_processes} accelerators, but {num_devices} can be seen; "
        f"{_describe_visibility()}.",
        f"torchrun --nproc-per-node={num_devices} …, or --device cpu, or let CUDA_VISIBLE_DEVICES name more",
    )


def _describe_visibility() -> str:
    settings = [f"{name} is {os.environ[name]!r}" for name in _VISIBILITY_VARIABLES if name in os.environ]
    return ", ".join(settings) or "CUDA_VISIBLE_DEVICES is not set"


def backend_of(device: torch.device) -> str:
    """Return the backend of the process group: gloo for host memory, the device's own library for its tensors."""
    return BACKENDS.get(device.type, "gloo")


def bound_device(device: torch.device) -> torch.device | None:
    """Return the device to bind the process group to, if its backend supports that."""
    # A bound NCCL connects during init_process_group, where a failure can still be reported. Otherwise it guesses the
    # device at the first collective.
    return device if device.type == "cuda" else None


def seed_accelerator(seed: int) -> None:
    """Seed the generator of this process's accelerator, if the process has initialised one."""
    module = _accelerator_module()
    # Seeding would initialise it, which takes device memory and is impossible in a forked loader worker.
    if module is not None and module.is_initialized():
        module.manual_seed(seed)


# Cached: this is asked for every batch, and the answer cannot change.
@lru_cache(maxsize=1)
def _accelerator_module() -> ModuleType | None:
    accelerator = torch.accelerator.current_accelerator()
    return torch.get_device_module(accelerator) if accelerator is not None and accelerator.type in BACKENDS else None


def constant(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """Return numbers as a float32 tensor on a device, without making the host wait."""
    # torch.tensor(..., device=device) copies synchronously; from pinned memory the copy is queued instead.
    return torch.tensor(values, dtype=torch.float32, pin_memory=device != CPU).to(device, non_blocking=True)


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return uninitialised host memory for a tensor's values; pinned if they come from an accelerator."""
    return torch.empty_like(tensor, device=CPU, pin_memory=tensor.device != CPU)


def wait_for_copies(sources: list[torch.Tensor]) -> None:
    """Wait until non-blocking copies from an accelerator into host memory are complete."""
    if any(source.device != CPU for source in sources):
        torch.accelerator.synchronize()


def has_fused_kernels(device: torch.device) -> bool:
    """Return whether torch's fused optimizers support a device."""
    return device == CPU or device.type in BACKENDS


def device_name(device: torch.device) -> str:
    if device == CPU:
        return cpu_model()
    return str(torch.get_device_module(device).get_device_name(device))


def cpu_model() -> str:
    """Return the model of this machine's CPU, or its architecture if that is all that is known."""
    fields: dict[str, str] = {}
    try:
        for line in _CPU_INFO.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            # Every core is listed; the first one counts.
            fields.setdefault(name.strip(), value.strip())
    except OSError:
        # Systems other than Linux lack the file. On Linux, platform.processor() is empty.
        return platform.processor() or platform.machine()
    # Virtual machines shorten the name, for example to "AMD EPYC", and ARM gives none. These numbers still distinguish
    # generations of CPUs, whose vector units may round differently.
    numbers = [
        f"{name} {fields[name]}" for name in ("cpu family", "model", "CPU implementer", "CPU part") if name in fields
    ]
    name = fields.get("model name", "") or platform.machine()
    return f"{name} ({', '.join(numbers)})" if numbers else name


def memory_in_mb(device: torch.device) -> int:
    """Return the peak memory of this process: allocated on its accelerator, or resident on a CPU."""
    if device == CPU:
        # Linux reports kilobytes.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return int(torch.accelerator.max_memory_allocated(device)) >> 20
