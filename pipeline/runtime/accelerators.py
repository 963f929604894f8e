"""The device of a process: which one, its name, how processes talk through it, its memory."""

from __future__ import annotations

import os
import platform
import resource
from pathlib import Path

import torch

from pipeline.errors import UsageError

CPU = torch.device("cpu")
_CPU_INFO = Path("/proc/cpuinfo")


def choose_device() -> torch.device:
    """Return the device of this process: the GPU of its local rank, or the CPU where there is no GPU."""
    if not torch.cuda.is_available():
        return CPU
    num_processes, num_gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if num_processes > num_gpus:
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise UsageError(
            f"{num_processes} processes on this machine need {num_processes} GPUs, but {num_gpus} can be seen; "
            + ("CUDA_VISIBLE_DEVICES is not set." if chosen is None else f"CUDA_VISIBLE_DEVICES is {chosen!r}."),
            f"torchrun --nproc-per-node={num_gpus} …, or let CUDA_VISIBLE_DEVICES name {num_processes} GPUs",
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def backend_of(device: torch.device) -> str:
    """Return how processes talk: small messages always through the CPU, tensors of a GPU from GPU to GPU."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def bound_device(device: torch.device) -> torch.device | None:
    """Return the device that a process group is bound to; NCCL would otherwise guess it at the first message."""
    return device if device.type == "cuda" else None


def seed_accelerators(seed: int) -> None:
    """Set the generator of this process's GPU, if it uses one; asking earlier would take memory on every GPU."""
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def wait_for_copies(buffers: list[torch.Tensor]) -> None:
    """Wait until what is being copied from a GPU into host memory has arrived."""
    if any(buffer.is_pinned() for buffer in buffers):
        torch.cuda.synchronize()


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()


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
    # Virtual machines shorten the name, such as to "AMD EPYC"; ARM has no name. The numbers tell generations apart.
    numbers = [
        f"{name} {fields[name]}" for name in ("cpu family", "model", "CPU implementer", "CPU part") if name in fields
    ]
    name = fields.get("model name", "") or platform.machine()
    return f"{name} ({', '.join(numbers)})" if numbers else name


def memory_in_mb(device: torch.device) -> int:
    """Return the peak memory of this process: of its GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) >> 20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
