"""The GPUs of this machine, as nvidia-smi tells them; torch would take seconds and memory to say less."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

from pipeline.errors import UsageError

_QUESTION = (
    "nvidia-smi",
    "--query-gpu=index,name,utilization.gpu,memory.used,memory.total",
    "--format=csv,noheader,nounits",
)
_SECONDS_TO_ANSWER = 3.0


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


def look_at_gpus() -> tuple[list[Gpu], str]:
    """Return the GPUs, and what is wrong if the driver's tool is there but cannot tell."""
    try:
        done = subprocess.run(_QUESTION, capture_output=True, text=True, timeout=_SECONDS_TO_ANSWER, check=False)
    except FileNotFoundError:
        return [], ""
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi did not answer within {_SECONDS_TO_ANSWER:.0f} seconds"
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
    """Return how many GPUs a process started now would see."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus, _ = look_at_gpus()
    if allowed is None:
        return len(gpus)
    return min(len(gpus), sum(bool(one.strip()) and one.strip() != "-1" for one in allowed.split(",")))
