"""The GPUs of this machine, as nvidia-smi lists them; torch would take seconds and memory to say less."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import UsageError

_QUESTION = (
    "nvidia-smi",
    "--query-gpu=index,name,utilization.gpu,memory.used,memory.total",
    "--format=csv,noheader,nounits",
)
_SECONDS_TO_SHOW = 3.0
# Without persistence mode, nvidia-smi takes many seconds on a node with many GPUs.
SECONDS_TO_COUNT = 30.0
# Where the drivers of other makers' accelerators are found.
_OTHER_DRIVERS = (Path("/dev/kfd"), Path("/dev/dri"))


@dataclass(frozen=True)
class Gpu:
    """One GPU; memory in MiB, load in per cent, None where the driver does not say."""

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
    """Return the GPUs, and what is wrong if the driver's tool is there but fails."""
    try:
        done = subprocess.run(_QUESTION, capture_output=True, text=True, timeout=seconds, check=False)
    except FileNotFoundError:
        return [], ""
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi did not answer within {seconds:g} seconds"
    except OSError as error:
        return [], f"nvidia-smi cannot be run: {error.strerror}"
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines()
        return [], f"nvidia-smi failed: {said[0] if said else f'exit code {done.returncode}'}"
    found = [_parsed(line) for line in done.stdout.splitlines()]
    return [gpu for gpu in found if gpu is not None], ""


def _parsed(line: str) -> Gpu | None:
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != 5 or not fields[0].isdigit():
        return None
    numbers = [int(field) if field.isdigit() else None for field in fields[2:]]
    return Gpu(int(fields[0]), fields[1], *numbers)


def parse_devices(text: str) -> list[int]:
    """Return the GPUs that ``0-3,6`` names; each once."""
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
    """Return how many accelerators a process started now would see; refuse to guess."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    num_allowed = None
    if allowed is not None:
        num_allowed = sum(bool(device.strip()) and device.strip() != "-1" for device in allowed.split(","))
    if num_allowed == 0:
        return 0
    gpus, problem = look_at_gpus(SECONDS_TO_COUNT)
    if problem:
        raise UsageError(
            f"The number of GPUs of this machine must be known, but {problem}.",
            "give the number of processes with --nproc N, or train on the CPU with --device cpu",
        )
    if not gpus and any(path.exists() for path in _OTHER_DRIVERS):
        # Only here: torch takes seconds to import.
        import torch

        return torch.accelerator.device_count()
    return len(gpus) if num_allowed is None else min(len(gpus), num_allowed)
