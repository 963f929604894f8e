"""The text of a batch script for Slurm: what one experiment, or each of several, needs, then what is common to all."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from pipeline.launch.torchrun_command import TrainingLine
from pipeline.paths import DATA_HOME_VARIABLE, ExperimentPaths

_SECONDS_OF_TORCHRUN = 30


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

    @property
    def paths(self) -> ExperimentPaths:
        """Where the script belongs."""
        return self.lines[0].paths

    @property
    def is_array(self) -> bool:
        return len(self.lines) > 1

    def script(self) -> str:
        parts = [*self._options(), "", *self._common(), *self._experiments(), ""]
        return "\n".join(parts) + files("pipeline.launch").joinpath("slurm_job.sh").read_text()

    def _options(self) -> Iterator[str]:
        yield "#!/bin/bash"
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
        yield _option("signal", f"B:USR1@{self.grace}")
        yield "#SBATCH --requeue"
        yield _option("open-mode", "append")
        yield _option("output", _output(self.paths, self.is_array))
        yield _option("chdir", Path.cwd())
        yield from (f"#SBATCH {option}" for option in self.more)

    def _common(self) -> Iterator[str]:
        yield f"export {DATA_HOME_VARIABLE}={shlex.quote(str(self.paths.home))}"
        # A run that Slurm itself signals may take as long for its step as one that is asked.
        yield f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={max(self.grace, _SECONDS_OF_TORCHRUN)}"
        yield f"python={shlex.quote(sys.executable)}"
        yield f"max_requeues={self.max_requeues}"
        yield f"seconds={self.seconds}"
        yield f"cpus_per_task={self.cpus_per_task}"

    def _experiments(self) -> Iterator[str]:
        if not self.is_array:
            yield from self._experiment(self.lines[0])
            return
        yield "case $SLURM_ARRAY_TASK_ID in"
        for number, line in enumerate(self.lines):
            yield f"{number})"
            yield from (f"    {text}" for text in self._experiment(line))
            yield f"    exec >> {shlex.quote(str(line.paths.launcher_log))} 2>&1"
            yield "    ;;"
        yield "esac"

    def _experiment(self, line: TrainingLine) -> Iterator[str]:
        yield f"experiment={line.paths.name}"
        yield f"state_file={shlex.quote(str(line.paths.state_file))}"
        yield f"starts_file={shlex.quote(str(line.paths.starts_file))}"
        for name, value in line.variables(line.nproc, self.cpus_per_task).items():
            yield f"export {name}={shlex.quote(value)}"
        yield f"training=({shlex.join([sys.executable, '-m', 'torch.distributed.run', *line.options])})"


def _output(paths: ExperimentPaths, is_array: bool) -> str:
    """Return where Slurm writes; next to the error files, because a reset deletes the logs."""
    folder = str(paths.error_files).replace("%", "%%")
    return f"{folder}/{'slurm-%A_%a.log' if is_array else paths.launcher_log.name}"


def _option(name: str, value: object) -> str:
    text = str(value)
    return f'#SBATCH --{name}="{text}"' if " " in text else f"#SBATCH --{name}={text}"
