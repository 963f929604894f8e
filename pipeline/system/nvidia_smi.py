"""The GPUs of this machine as listed by nvidia-smi.

torch is not asked: it takes seconds to import, takes memory on the device, and reports less.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import UsageError

_QUERY = (
    "nvidia-smi",
    "--query-gpu=index,name,utilization.gpu,memory.used,memory.total",
    "--format=csv,noheader,nounits",
)
# A status table does not wait long for a driver that hangs.
_SECONDS_TO_SHOW = 3.0
# Longer for a launch, which depends on the number. Without persistence mode, nvidia-smi takes many seconds on a node
# with many GPUs.
SECONDS_TO_COUNT = 30.0
# Device files of AMD's and Intel's drivers, which nvidia-smi does not cover.
_OTHER_DRIVERS = (Path("/dev/kfd"), Path("/dev/dri"))


@dataclass(frozen=True)
class Gpu:
    """One GPU: memory in MiB, load in per cent, None where the driver reports nothing."""

    index: int
    name: str
    load: int | None
    memory_used: int | None
    memory_total: int | None

    def __str__(self) -> str:
        load = "?" if self.load is None else f"{self.load} %"
        return f"{self.index} {self.name}: {load}, {_gb(self.memory_used)} of {_gb(self.memory_total)} GB"


def _gb(mebibytes: int | None) -> str:
    return "?" if mebibytes is None else f"{mebibytes * 1.048576 / 1000:.1f}"


def look_at_gpus(seconds: float = _SECONDS_TO_SHOW) -> tuple[list[Gpu], str]:
    """Return the GPUs, and a description of the problem if nvidia-smi exists but fails."""
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=seconds, check=False)
    except FileNotFoundError:
        # No NVIDIA driver: no GPUs, and no problem.
        return [], ""
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi did not answer within {seconds:g} seconds"
    except OSError as error:
        return [], f"nvidia-smi cannot be run: {error.strerror}"
    if done.returncode != 0:
        output = (done.stdout + done.stderr).strip().splitlines()
        return [], f"nvidia-smi failed: {output[0] if output else f'exit code {done.returncode}'}"
    gpus = []
    for line in done.stdout.splitlines():
        fields = [field.strip() for field in line.split(",")]
        # Lines of any other form are not GPUs.
        if len(fields) == 5 and fields[0].isdigit():
            # Some GPUs do not report load or memory: the field is then "[N/A]".
            numbers = [int(field) if field.isdigit() else None for field in fields[2:]]
            gpus.append(Gpu(int(fields[0]), fields[1], *numbers))
    return gpus, ""


def parse_devices(text: str) -> list[int]:
    """Return the indices of the GPUs in a list such as ``0-3,6``; refuse duplicates."""
    devices: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)):
            raise UsageError(f"GPUs must be given as 0-3 or 0,2,5, but are {text!r} instead.")
        devices += range(int(first), int(last or first) + 1)
    if len(set(devices)) < len(devices):
        raise UsageError(f"GPUs {text!r} name one of them twice.")
    return devices


def num_visible() -> int:
    """Return how many accelerators a process that is started now would see; raise if this cannot be known."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    num_allowed = None
    if visible is not None:
        # Empty and -1 both mean that no GPU is visible.
        num_allowed = sum(bool(device.strip()) and device.strip() != "-1" for device in visible.split(","))
    if num_allowed == 0:
        return 0
    gpus, problem = look_at_gpus(SECONDS_TO_COUNT)
    if problem:
        # Not taken for none: one process on a machine of eight GPUs would waste a night.
        raise UsageError(
            f"The number of GPUs of this machine must be known, but {problem}.",
            "give the number of processes with --nproc N, or train on the CPU with --device cpu",
        )
    if not gpus and any(path.exists() for path in _OTHER_DRIVERS):
        # Imported only here, because it takes seconds.
        import torch

        return torch.accelerator.device_count()
    return len(gpus) if num_allowed is None else min(len(gpus), num_allowed)
