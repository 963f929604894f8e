"""The right torchrun line for an experiment, to be printed, run here, or started in the background."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from pipeline.arguments import parse_arguments, verb_line
from pipeline.errors import UsageError
from pipeline.lifecycle.starts import read_starts
from pipeline.monitoring.launch_record import record_launch
from pipeline.paths import ExperimentPaths, data_home
from pipeline.system.nvidia_smi import SECONDS_TO_COUNT, look_at_gpus, num_visible, parse_devices


@dataclass(frozen=True)
class TrainingLine:
    """A torchrun line of one experiment, with the variables it needs."""

    paths: ExperimentPaths
    nproc: int
    devices: tuple[int, ...]
    flags: tuple[str, ...]
    in_background: bool
    num_nodes: int = 1

    @property
    def words(self) -> list[str]:
        return [*_torchrun(), *self.options]

    @property
    def options(self) -> list[str]:
        """A port of its own, a file for the output of every process that does not own the terminal, then the run."""
        others = range(0 if self.in_background else 1, self.nproc)
        redirects = [f"--redirects={','.join(f'{rank}:3' for rank in others)}"] if others else []
        home = [] if self.paths.home == data_home(None) else ["--data-home", str(self.paths.home)]
        return [
            *self._meeting(),
            f"--nproc-per-node={self.nproc}",
            f"--log-dir={self.paths.torchrun_logs}",
            *redirects,
            *("-m", "training_pipeline", self.paths.name, *home, *self.flags),
        ]

    def _meeting(self) -> list[str]:
        """Return how processes find each other; on several nodes, variables of torchrun say where."""
        return ["--standalone"] if self.num_nodes == 1 else [f"--nnodes={self.num_nodes}", "--rdzv-backend=c10d"]

    def variables(self, num_processes: int, num_cpus: int | None = None) -> dict[str, str]:
        """Return what the line needs in its environment, where ``num_processes`` share this machine or ``num_cpus``."""
        share = max(1, (num_cpus or os.cpu_count() or 1) // num_processes)
        chosen = {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(self._threads(share)),
            "TORCHELASTIC_ERROR_FILE": str(self.paths.error_files / "error.json"),
        }
        if self.devices:
            # Numbers must mean what nvidia-smi shows, not what CUDA finds fastest.
            chosen |= {
                "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
                "CUDA_VISIBLE_DEVICES": ",".join(map(str, self.devices)),
            }
        return chosen

    def _threads(self, share: int) -> int:
        """Return as many threads as at the last start, because bits depend on them, else a fair share."""
        starts = [start for start in read_starts(self.paths) if isinstance(start.get("threads"), int)]
        return int(starts[-1]["threads"]) if starts else share

    def shown(self, num_processes: int) -> str:
        """Return the line as one would type it."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.variables(num_processes).items()]
        return " ".join([*variables, shlex.join(self.words)])

    def make_folders(self) -> None:
        for folder in (self.paths.torchrun_logs, self.paths.error_files):
            folder.mkdir(parents=True, exist_ok=True)


def training_line(
    paths: ExperimentPaths,
    *,
    nproc: int | None,
    gpus: str | None = None,
    flags: list[str],
    in_background: bool,
    num_nodes: int = 1,
) -> TrainingLine:
    """Return the line for one experiment, or refuse devices and flags that cannot be."""
    # A flag that training would refuse is refused here, before anything is started.
    arguments = parse_arguments([paths.name, *flags])
    devices = parse_devices(gpus) if gpus else []
    _check_devices(devices)
    if nproc is None:
        nproc = len(devices) or (0 if arguments.device == "cpu" else num_visible()) or 1
    if nproc < 1 or (devices and nproc > len(devices)):
        have = f" on {len(devices)} GPUs" if devices else ""
        raise UsageError(f"--nproc must be at least 1 and have a GPU each, but is {nproc}{have}.")
    return TrainingLine(paths, nproc, tuple(devices), tuple(flags), in_background, num_nodes)


def _check_devices(devices: list[int]) -> None:
    known = [gpu.index for gpu in look_at_gpus(SECONDS_TO_COUNT)[0]] if devices else []
    missing = [str(device) for device in devices if known and device not in known]
    if missing:
        raise UsageError(f"There is no GPU {', '.join(missing)}; nvidia-smi lists {', '.join(map(str, known))}.")


def _torchrun() -> list[str]:
    """Return torchrun as a person would call it, if that is the one of this Python."""
    own = Path(sys.executable).parent / "torchrun"
    is_on_path = own.exists() and shutil.which("torchrun") == str(own)
    return ["torchrun"] if is_on_path else [sys.executable, "-m", "torch.distributed.run"]


def start_in_background(script: str, chain: list[ExperimentPaths]) -> None:
    """Start a shell script that outlives this terminal, on behalf of experiments that take turns in it."""
    first = chain[0]
    with first.launcher_log.open("ab") as log:
        process = subprocess.Popen(
            ["/bin/sh", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    for before, paths in zip([None, *chain], chain, strict=False):
        record_launch(paths, process.pid, before.name if before else None)
    print(f"{' then '.join(paths.name for paths in chain)}: started in the background as process {process.pid}")
    print(f"  follow: {verb_line('logs', first.name, first.home, '-f')}")
    print(f"  stop:   {verb_line('stop', first.name, first.home)}")
