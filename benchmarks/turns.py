"""Jobs and turns: what a contender is asked to do, and its place at the table.

Contenders that are alive together train one epoch each in turn, so that noise affects all alike.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch.distributed as dist

# The hand-written loop with a fused optimizer.
FUSED = "fused"
# The end of the name of a contender that trains with a feature, beside one that trains without it.
WITH = "_with"
# Whoever waits must not take time from those who train.
_SECONDS_BETWEEN_LOOKS = 0.05


@dataclass(frozen=True)
class Job:
    """What one contender does; ``BENCH_JOB`` hands it down."""

    kind: str
    name: str
    folder: str
    num_epochs: int
    # Save weights and optimizer after every so many steps; 0 saves nothing.
    checkpoint_every: int = 0
    # Evaluate after each epoch, and keep the weights of the best, of the last and of every n-th epoch; 0 keeps nothing.
    pool_period: int = 0
    # Continue from what an earlier life of the same job has saved.
    resumes: bool = False
    # Note when each step ends.
    marks_steps: bool = False

    @classmethod
    def from_environment(cls) -> Job:
        return cls(**json.loads(os.environ["BENCH_JOB"]))

    def as_environment(self) -> dict[str, str]:
        return {"BENCH_JOB": json.dumps(asdict(self))}

    @property
    def has_feature(self) -> bool:
        """Whether this contender trains with the feature whose cost is asked for."""
        return self.name.endswith(WITH)

    @property
    def saved(self) -> Path:
        """The folder for whatever this contender saves."""
        return Path(self.folder) / f"{self.name}.saved"

    @property
    def facts_file(self) -> Path:
        """One line of facts for each epoch."""
        return Path(self.folder) / f"{self.name}.jsonl"

    @property
    def ready_file(self) -> Path:
        """Is there once the contender could begin."""
        return Path(self.folder) / f"{self.name}.ready"

    @property
    def first_file(self) -> Path:
        """Is there once a job that marks its steps has taken the first one."""
        return Path(self.folder) / f"{self.name}.first"

    @property
    def turn_file(self) -> Path:
        """Names who may train now; the one who has trained removes it."""
        return Path(self.folder) / "turn"


class Turn:
    """The clock of one contender."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._is_rank_zero = os.environ.get("RANK", "0") == "0"
        self._marks: list[float] = []

    def wait(self) -> None:
        """Return when it is this contender's turn to train an epoch."""
        if self._is_rank_zero:
            self._job.ready_file.touch()
        while self._current() != self._job.name:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        if dist.is_initialized():
            # Those who look at different moments begin at the same.
            dist.barrier()
        self._marks.clear()
        self._started, self._cpu = time.perf_counter(), time.process_time()

    def _current(self) -> str:
        try:
            return self._job.turn_file.read_text()
        except FileNotFoundError:
            return ""

    def step(self) -> None:
        """Note that a step has ended, for jobs that mark their steps."""
        if not self._marks and self._is_rank_zero:
            self._job.first_file.touch()
        self._marks.append(time.perf_counter())

    def done(self) -> None:
        """Report the epoch."""
        if not self._is_rank_zero:
            # The turn is over when rank zero says so.
            time.sleep(2 * _SECONDS_BETWEEN_LOOKS)
            return
        facts = {
            "seconds": time.perf_counter() - self._started,
            "cpu": time.process_time() - self._cpu,
            "memory": _peak_memory(),
            "marks": self._marks,
        }
        with self._job.facts_file.open("a") as file:
            file.write(json.dumps(facts) + "\n")
        self._job.turn_file.unlink()


def _peak_memory() -> float:
    """Return the most megabytes that were resident since the last question, and begin anew."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    Path("/proc/self/clear_refs").write_text("5")
    return peak / 1024


@cache
def own_turn() -> Turn:
    """Return the turn of this process, for those whose parts do not know each other."""
    return Turn(Job.from_environment())
