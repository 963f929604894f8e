"""The text of a batch script for Slurm: what differs between jobs, then ``slurm_job.sh``, the same in all."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from pipeline.launch.torchrun_command import ENTRY, ROOT, TrainingLine
from pipeline.paths import DATA_HOME_VARIABLE, ExperimentPaths

_MIN_SHUTDOWN_SECONDS = 30


@dataclass(frozen=True)
class Job:
    """What to ask Slurm for; several experiments are tasks of one array."""

    lines: tuple[TrainingLine, ...]
    time: str
    seconds: int
    grace: int
    max_requeues: int
    cpus_per_task: int
    gpus_per_node: int | None
    at_once: int | None
    more: tuple[str, ...]
    setup: Path | None = None
    container_image: str | None = None

    @property
    def paths(self) -> ExperimentPaths:
        """Where the script belongs."""
        return self.lines[0].paths

    @property
    def is_array(self) -> bool:
        return len(self.lines) > 1

    def script(self) -> str:
        lines = ["#!/bin/bash", *self._list_options(), "", *self._list_variables(), ""]
        return "\n".join(lines) + files("pipeline.launch").joinpath("slurm_job.sh").read_text()

    def _list_options(self) -> Iterator[str]:
        others = f"+{len(self.lines) - 1}" if self.is_array else ""
        yield _option("job-name", self.paths.name + others)
        if self.is_array:
            throttle = f"%{self.at_once}" if self.at_once else ""
            yield _option("array", f"0-{len(self.lines) - 1}{throttle}")
        yield _option("nodes", self.lines[0].num_nodes)
        yield _option("ntasks-per-node", 1)
        yield _option("cpus-per-task", self.cpus_per_task)
        if self.gpus_per_node:
            yield _option("gpus-per-node", self.gpus_per_node)
        yield _option("time", self.time)
        # To the batch shell alone, which asks the run to stop: a signal to torchrun would end it with an error.
        yield _option("signal", f"B:USR1@{self.grace}")
        yield "#SBATCH --requeue"
        # A requeued job continues the log of the one before.
        yield _option("open-mode", "append")
        # Next to the error files, because a reset deletes the logs. Slurm fills in what follows a single "%".
        log = "slurm-%A_%a.log" if self.is_array else self.paths.launcher_log.name
        yield _option("output", f"{str(self.paths.error_files).replace('%', '%%')}/{log}")
        yield _option("chdir", Path.cwd())
        yield from (f"#SBATCH {option}" for option in self.more)

    def _list_variables(self) -> Iterator[str]:
        """Yield what ``slurm_job.sh`` needs to know."""
        yield f"export {DATA_HOME_VARIABLE}={shlex.quote(str(self.paths.home))}"
        # Under preemption Slurm signals the run itself, which may then take as long for its step as one that is asked.
        yield f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={max(self.grace, _MIN_SHUTDOWN_SECONDS)}"
        python, entry = ENTRY
        yield f"python={shlex.quote(python)}"
        yield f"entry={shlex.quote(entry)}"
        if self.setup is not None:
            # Sourced, so that what it activates holds for all that follows.
            yield f"source {shlex.quote(str(self.setup))}"
        yield f"max_requeues={self.max_requeues}"
        yield f"seconds={self.seconds}"
        yield f"cpus_per_task={self.cpus_per_task}"
        if not self.is_array:
            yield from self._list_experiment(self.lines[0])
            return
        yield "case $SLURM_ARRAY_TASK_ID in"
        for number, line in enumerate(self.lines):
            yield f"{number})"
            yield from (f"    {text}" for text in self._list_experiment(line))
            # Slurm has one name for the logs of all tasks; each continues in its experiment's own log.
            yield f"    exec >> {shlex.quote(str(line.paths.launcher_log))} 2>&1"
            yield "    ;;"
        yield "esac"

    def _list_experiment(self, line: TrainingLine) -> Iterator[str]:
        yield f"experiment={line.paths.name}"
        yield f"state_file={shlex.quote(str(line.paths.state_file))}"
        yield f"starts_file={shlex.quote(str(line.paths.starts_file))}"
        for name, value in line.variables(line.nproc, self.cpus_per_task).items():
            yield f"export {name}={shlex.quote(value)}"
        yield f"container=({shlex.join(self._container_options(line))})"
        # A container has a Python of its own, which finds this package by its path.
        python = [sys.executable] if self.container_image is None else ["env", f"PYTHONPATH={ROOT}", "python3"]
        yield f"training=({shlex.join([*python, '-m', 'torch.distributed.run', *line.options])})"

    def _container_options(self, line: TrainingLine) -> list[str]:
        """Return the options of srun for the container, with all folders that a run needs under their own paths."""
        if self.container_image is None:
            return []
        folders = dict.fromkeys(map(str, (line.paths.home, line.paths.top, ROOT, Path.cwd())))
        return [
            f"--container-image={self.container_image}",
            f"--container-mounts={','.join(f'{folder}:{folder}' for folder in folders)}",
            f"--container-workdir={Path.cwd()}",
        ]


def _option(name: str, value: object) -> str:
    text = str(value)
    # sbatch splits its directives at blanks.
    return f'#SBATCH --{name}="{text}"' if " " in text else f"#SBATCH --{name}={text}"
