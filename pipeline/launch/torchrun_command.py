"""How the processes of an experiment are started: by our own verb, by torchrun, or in the background."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from pipeline.arguments import parse_arguments
from pipeline.command_lines import home_option, torchrun_words, verb_line
from pipeline.errors import UsageError
from pipeline.lifecycle.starts import read_starts
from pipeline.monitoring.launch_record import record_launch
from pipeline.paths import RESULTS_HOME_VARIABLE, ExperimentPaths, results_home
from pipeline.system.nvidia_smi import SECONDS_TO_COUNT, look_at_gpus, num_visible, parse_devices

ROOT = Path(__file__).resolve().parents[2]
# Found whatever the current folder and the search path are.
ENTRY = (sys.executable, str(ROOT / "training_pipeline.py"))


@dataclass(frozen=True)
class TrainingLine:
    """The processes that train one experiment, and the commands that start them."""

    paths: ExperimentPaths
    nproc: int
    devices: tuple[int, ...]
    flags: tuple[str, ...]
    in_background: bool
    num_nodes: int = 1

    @property
    def train_words(self) -> list[str]:
        """The command that trains by the verb ``train``, whatever the current folder and the search path are."""
        redirect = ["--output-to-files"] if self.in_background else []
        return [*ENTRY, "train", self.experiment, f"--nproc={self.nproc}", *redirect, *self._arguments]

    @property
    def worker_words(self) -> list[str]:
        """The command of one training process."""
        return [*ENTRY, self.experiment, *self._arguments]

    @property
    def experiment(self) -> str:
        """The name on the command line; a quick try has results of another name."""
        return self.paths.settings_name or self.paths.name

    @property
    def redirected_ranks(self) -> range:
        """The processes whose output goes to files: rank zero writes to the terminal if there is one."""
        return range(0 if self.in_background else 1, self.nproc)

    @property
    def _arguments(self) -> list[str]:
        return ["--data-home", str(self.paths.home), *self.flags]

    @property
    def torchrun_words(self) -> list[str]:
        """The whole command with torchrun, as a person would call it."""
        return [*torchrun_words(), *self.options]

    @property
    def options(self) -> list[str]:
        """The options of torchrun, then the module to run and its arguments."""
        redirected = ",".join(f"{rank}:3" for rank in self.redirected_ranks)
        redirects = [f"--redirects={redirected}"] if redirected else []
        # --standalone picks a free port, so that runs on one machine do not meet each other. On several nodes, the
        # batch script passes the rendezvous address in environment variables.
        several_nodes = [f"--nnodes={self.num_nodes}", "--rdzv-backend=c10d"]
        return [
            *(["--standalone"] if self.num_nodes == 1 else several_nodes),
            f"--nproc-per-node={self.nproc}",
            f"--log-dir={self.paths.torchrun_logs}",
            *redirects,
            *("-m", "training_pipeline", self.experiment, *home_option(self.paths.home), *self.flags),
        ]

    def variables(self, num_processes: int, num_cpus: int | None = None) -> dict[str, str]:
        """Return the environment it needs where ``num_processes`` share ``num_cpus``, or else this machine."""
        num_threads = os.environ.get("OMP_NUM_THREADS")
        if not num_threads:
            # As many as at the last start, because bits depend on them, else a fair share.
            recorded = [start["threads"] for start in read_starts(self.paths) if isinstance(start.get("threads"), int)]
            share = max(1, (num_cpus or os.cpu_count() or 1) // num_processes)
            num_threads = str(int(recorded[-1]) if recorded else share)
        variables = {
            "OMP_NUM_THREADS": num_threads,
            "TORCHELASTIC_ERROR_FILE": str(self.paths.error_files / "error.json"),
        }
        if results := results_home():
            variables[RESULTS_HOME_VARIABLE] = str(results)
        if self.devices:
            # GPUs are numbered as nvidia-smi shows them; by default CUDA numbers the fastest first.
            variables |= {
                "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
                "CUDA_VISIBLE_DEVICES": ",".join(map(str, self.devices)),
            }
        return variables

    def to_shell(self, words: list[str], num_processes: int) -> str:
        """Return one of its commands as a line of a shell, with the variables it needs."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.variables(num_processes).items()]
        return " ".join([*variables, shlex.join(words)])

    def make_folders(self) -> None:
        for folder in (self.paths.torchrun_logs, self.paths.error_files):
            folder.mkdir(parents=True, exist_ok=True)


def add_process_options(parser: argparse.ArgumentParser) -> None:
    """Add how many processes there are, and on which GPUs."""
    parser.add_argument("--nproc", type=int, metavar="N", help="number of processes (default: one per GPU, else 1)")
    parser.add_argument("--gpus", metavar="GPUS", help="which GPUs, as nvidia-smi numbers them: 0-3 or 0,2")


def given_process_options(arguments: argparse.Namespace) -> list[str]:
    """Return these options as they were given."""
    given = {"--nproc": arguments.nproc, "--gpus": arguments.gpus}
    return [word for option, value in given.items() if value is not None for word in (option, str(value))]


def training_line(
    paths: ExperimentPaths,
    *,
    nproc: int | None,
    gpus: str | None = None,
    flags: list[str],
    in_background: bool,
    num_nodes: int = 1,
) -> TrainingLine:
    """Return the line for one experiment, or refuse devices that do not exist and flags that are unknown."""
    # A flag that training would refuse is refused here, before anything is started.
    arguments = parse_arguments([paths.name, "--data-home", str(paths.home), *flags])
    devices = parse_devices(gpus) if gpus else []
    known = [gpu.index for gpu in look_at_gpus(SECONDS_TO_COUNT)[0]] if devices else []
    # Without an answer of nvidia-smi any number may be right.
    missing = [str(device) for device in devices if known and device not in known]
    if missing:
        raise UsageError(f"GPU {', '.join(missing)} does not exist; nvidia-smi lists {', '.join(map(str, known))}.")
    if nproc is None:
        nproc = len(devices) or (0 if arguments.device == "cpu" else num_visible()) or 1
    if nproc < 1 or (devices and nproc > len(devices)):
        have = f" on {len(devices)} GPUs" if devices else ""
        raise UsageError(f"--nproc must be at least 1 and have a GPU each, but is {nproc}{have}.")
    return TrainingLine(arguments.paths, nproc, tuple(devices), tuple(flags), in_background, num_nodes)


def start_in_background(script: str, chain: list[ExperimentPaths]) -> None:
    """Start a shell script that outlives this terminal and trains these experiments one after the other."""
    first = chain[0]
    # A session of its own: closing the terminal does not reach it, and one signal to its process group ends all of it.
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
