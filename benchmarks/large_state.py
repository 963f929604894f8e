"""What 1.2 GB of weights and moments cost: saving them while training, and starting from them."""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from dataclasses import replace

from benchmarks.driver import AGAIN, HAND_WRITTEN, PEERS, PIPELINE, Contender, Facts, invite, play, table
from benchmarks.rows import Row, Spread, ratios
from benchmarks.turns import Job

_EVERY = 5


def measure(rounds: int) -> list[Row]:
    """Return the rows of training with checkpoints, and of resuming from the last of them."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DISK")) as folder:
        jobs = [
            Job("large", name, folder, num_epochs=rounds + 3, checkpoint_every=_EVERY, marks_steps=True)
            for name in _names()
        ]
        with table(jobs) as contenders:
            facts = play(contenders, rounds, settles=True)
        resumed = first_steps([replace(job, resumes=True) for job in jobs], rounds)
    return [*_saving(facts), start_row("e  start to first step, resuming 1.2 GB", "≤ 1.30", resumed)]


def start(rounds: int) -> list[Row]:
    """Return the row of a fresh start with a small model."""
    times: dict[str, list[float]] = {name: [] for name in _names()}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            jobs = [Job("tiny", name, folder, num_epochs=1, marks_steps=True) for name in _names()]
            for name, (seconds,) in first_steps(jobs, 1).items():
                times[name].append(seconds)
    return [start_row("e  start to first step, fresh", "≤ 1.15", times)]


def _names() -> list[str]:
    return [HAND_WRITTEN, PIPELINE, AGAIN, *PEERS]


def first_steps(jobs: list[Job], rounds: int) -> dict[str, list[float]]:
    """Start each job in turn, kill it after its first step, and return the seconds until then."""
    times: dict[str, list[float]] = {job.name: [] for job in jobs}
    for _ in range(rounds):
        for job in jobs:
            job.first_file.unlink(missing_ok=True)
            invite(job)
            contender = Contender(job)
            contender.wait_for(job.first_file)
            times[job.name].append(time.perf_counter() - contender.started)
            contender.kill()
    return times


def start_row(label: str, goal: str, times: dict[str, list[float]]) -> Row:
    cells = {name: ratios(own, times[HAND_WRITTEN]) for name, own in times.items() if name != HAND_WRITTEN}
    return Row(label, goal, cells, {"seconds": {name: statistics.median(own) for name, own in times.items()}})


def _saving(facts: dict[str, Facts]) -> list[Row]:
    blocked = {name: [_blocked(one["marks"]) for one in own] for name, own in facts.items()}
    slowed = {name: [_lost(one["marks"]) for one in own] for name, own in facts.items()}
    shown = [
        ("f  loop blocked by a checkpoint of 1.2 GB", "ahead of all", blocked),
        ("f  training with a checkpoint every 5 steps: time lost to it", "ahead of all", slowed),
    ]
    rows = []
    for label, goal, times in shown:
        seconds = {name: Spread.of(own) for name, own in times.items()}
        cells = {name: ratios(own, times[HAND_WRITTEN]) for name, own in times.items() if name != HAND_WRITTEN}
        rows.append(Row(label, goal, cells, {"seconds per checkpoint": seconds}))
    return rows


def _gaps(marks: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(marks)]


def _usual(marks: list[float]) -> float:
    """Return how long a step takes whose predecessor did not save and in whose time nothing is being written."""
    return min(statistics.median(_gaps(marks)), statistics.median(_gaps(marks[:_EVERY])))


def _blocked(marks: list[float]) -> float:
    """Return how much later the step after a checkpoint ended than it would have without."""
    after = _gaps(marks)[_EVERY - 1 :: _EVERY]
    return statistics.mean(after) - _usual(marks)


def _lost(marks: list[float]) -> float:
    """Return how much all steps took together above what they would have, for each checkpoint."""
    gaps = _gaps(marks)
    return (sum(gaps) - len(gaps) * _usual(marks)) / (len(gaps[_EVERY - 1 :: _EVERY]))
