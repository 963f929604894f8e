"""Starts contenders, gives them their turns and reads what they report."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import experiment
from benchmarks.turns import FUSED, WITH, Job
from benchmarks.work import KINDS
from tests.support.running import ENTRY, family, send

HAND_WRITTEN, AGAIN, PIPELINE, EXACT = "hand-written", "again", "pipeline", "exact"
PIPELINE_WITH, FUSED_WITH = f"{PIPELINE}{WITH}", f"{FUSED}{WITH}"
_OURS = (PIPELINE, EXACT, PIPELINE_WITH)
# The hand-written loops of kinds of work that need one of their own.
_FEATURES = "benchmarks.hand_written_features"
_LOOPS = {"many": "benchmarks.hand_written_many", "turns": "benchmarks.hand_written_game"} | dict.fromkeys(
    ("tokens", "metrics", "average", "rows"), _FEATURES
)
PEERS = {
    "lightning": "benchmarks.peers.lightning_trainer",
    "accelerate": "benchmarks.peers.accelerate_loop",
    "ignite": "benchmarks.peers.ignite_engine",
    "mmengine": "benchmarks.peers.mmengine_runner",
}
_ROOT = ENTRY.parent
_SECONDS_BETWEEN_LOOKS = 0.01
_SECONDS_TO_SETTLE = 1.0
Facts = list[dict[str, Any]]


class Contender:
    """One of those that are compared, as a torchrun of its own."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._output = Path(job.folder) / f"{job.name}.txt"
        if job.name in _OURS and not job.resumes:
            experiment.write(job)
        self.started = time.perf_counter()
        with self._output.open("w") as output:
            self._process = subprocess.Popen(self._line(), env=self._environment(), stdout=output, stderr=output)

    def _line(self) -> list[str]:
        torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={KINDS[self.job.kind].world_size}"]
        return [sys.executable, *torchrun, *self._program()]

    def _program(self) -> list[str]:
        if self.job.name in _OURS:
            return [str(ENTRY), self.job.name, "--auto", "--data-home", self.job.folder]
        own = _LOOPS.get(self.job.kind, "benchmarks.hand_written")
        return ["-m", PEERS.get(self.job.name, own)]

    def _environment(self) -> dict[str, str]:
        # Packages come with their bytecode, which we too shall be allowed to keep.
        usual = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        return {**usual, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT), **self.job.as_environment()}

    def wait_for(self, path: Path, *, gone: bool = False) -> None:
        while path.exists() == gone:
            if self._process.poll() is not None:
                raise SystemExit(f"{self.job.name} has ended too early:\n{self._output.read_text()}")
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def take_turn(self) -> None:
        """Let it train one epoch while all others wait, and do what it does after an epoch."""
        self.job.ready_file.unlink()
        invite(self.job)
        self.wait_for(self.job.turn_file, gone=True)
        while not self.job.ready_file.exists() and self._process.poll() is None:
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def facts(self) -> Facts:
        """Return what it has reported of each epoch but the first, which is not counted."""
        return [json.loads(line) for line in self.job.facts_file.read_text().splitlines()[1:]]

    def wait(self) -> None:
        """Return when it has come to its own end."""
        self._process.wait()

    def kill(self) -> None:
        for pid in family(self._process.pid) if self._process.poll() is None else ():
            send(pid, signal.SIGKILL)
        self._process.wait()


def invite(job: Job) -> None:
    """Say whose turn it is."""
    new = job.turn_file.with_suffix(".new")
    new.write_text(job.name)
    new.rename(job.turn_file)


@contextmanager
def table(jobs: Sequence[Job]) -> Iterator[dict[str, Contender]]:
    """Start contenders one after the other, and end them all."""
    contenders: dict[str, Contender] = {}
    try:
        for job in jobs:
            contenders[job.name] = Contender(job)
            contenders[job.name].wait_for(job.ready_file)
        yield contenders
    finally:
        for contender in contenders.values():
            contender.kill()


def play(contenders: Mapping[str, Contender], rounds: int, *, settles: bool = False) -> dict[str, Facts]:
    """Let all train in turn, one round more than is counted; return what they reported.

    The order is another in every round: whatever one leaves behind shall not always hit the same other.
    """
    for number in range(rounds + 1):
        for contender in random.Random(number).sample(list(contenders.values()), len(contenders)):
            contender.take_turn()
            if settles:
                # What one leaves to the kernel must not be paid for by the next.
                time.sleep(_SECONDS_TO_SETTLE)
                os.sync()
    return {name: contender.facts() for name, contender in contenders.items()}
