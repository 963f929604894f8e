"""Campaigns: a real run is killed again and again, resumed, and compared with one that never was."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline.store.compare import first_difference
from tests.crash.experiment import (
    EVERY_STEPS,
    RESULTS,
    committed,
    is_finished,
    is_writing,
    left_over,
    prepare,
    record_faults,
    redone_steps,
)
from tests.support.running import BackgroundRun, describe, run_process


@dataclass(frozen=True)
class Life:
    """One life of a run: what ended it, and where it had come to."""

    aim: str
    was_killed: bool
    was_writing: bool
    state: dict[str, Any]
    processes_left: list[str]


@dataclass
class Table:
    """What a campaign has shown."""

    processes: int
    seed: int
    checkpoint_every_steps: int = EVERY_STEPS
    kills: int = 0
    kills_inside_a_write: int = 0
    resumed: int = 0
    rounds: int = 0
    finals_bit_identical: int = 0
    records_duplicated: int = 0
    records_missing: int = 0
    max_steps_redone: int = 0
    processes_left: int = 0
    temporary_files_left: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def is_passed(self) -> bool:
        is_complete = self.resumed == self.kills and self.finals_bit_identical == self.rounds > 0
        is_tidy = not (self.processes_left or self.temporary_files_left)
        # A kill costs the steps since the last complete commit: an interval, and another while the next is written.
        is_cheap = self.max_steps_redone <= 2 * self.checkpoint_every_steps
        is_recorded = not (self.records_duplicated or self.records_missing)
        return is_complete and is_tidy and is_cheap and is_recorded and not self.problems

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.is_passed}

    def __str__(self) -> str:
        return "\n".join(f"  {name.replace('_', ' '):24} {value}" for name, value in self.as_json().items())


def live(home: Path, nproc: int, aim: str, draw: random.Random) -> Life:
    """Start or continue a run and kill it some commits later; one that ends by itself before is not killed."""
    with BackgroundRun(home, "--auto", nproc=nproc) as run:
        wanted = committed(home).get("generation", 0) + draw.randint(1, 4)
        run.wait_for(lambda: committed(home).get("generation", 0) >= wanted or run.process.poll() is not None)
        _wait_for_instant(home, run, aim, draw)
        was_killed = run.process.poll() is None
        run.strike()
        was_writing, left = is_writing(home), [describe(pid) for pid in run.left_alive()]
        if not was_killed and run.process.returncode != 0:
            raise AssertionError(f"a run ended by itself with {run.process.returncode}:\n{run.text()}")
    return Life(aim, was_killed, was_killed and was_writing, committed(home), left)


def live_anywhere(home: Path, nproc: int, seconds: float, draw: random.Random) -> Life:
    """Start or continue a run and kill it at any instant of a life that takes so long, its start-up included."""
    instant = time.monotonic() + draw.uniform(0, seconds)
    with BackgroundRun(home, "--auto", nproc=nproc) as run:
        while time.monotonic() < instant and run.process.poll() is None:
            time.sleep(0.002)
        was_killed = run.process.poll() is None
        run.strike()
        was_writing, left = is_writing(home), [describe(pid) for pid in run.left_alive()]
        if not was_killed and run.process.returncode != 0:
            raise AssertionError(f"a run ended by itself with {run.process.returncode}:\n{run.text()}")
    return Life("anywhere", was_killed, was_killed and was_writing, committed(home), left)


def _wait_for_instant(home: Path, run: BackgroundRun, aim: str, draw: random.Random) -> None:
    if aim == "random":
        time.sleep(draw.uniform(0, 0.4))
        return
    for _ in range(draw.randint(1, 3)):
        for is_wanted in (False, True):
            run.wait_for(
                lambda is_wanted=is_wanted: is_writing(home) == is_wanted or run.process.poll() is not None, every=0.001
            )
    time.sleep(draw.uniform(0, 0.03))


def survive_kills(home: Path, nproc: int, num_kills: int, seed: int, seconds: float | None = None) -> Iterator[Life]:
    """Kill a run up to ``num_kills`` times and let it finish.

    By turns at random and inside a write, each time after new commits; with the ``seconds`` that a life takes, at any
    instant of it, so that many kills come before the first commit.
    """
    draw = random.Random(seed)
    for number in range(num_kills):
        if is_finished(home):
            break
        if seconds is None:
            yield live(home, nproc, "write" if number % 2 else "random", draw)
        else:
            yield live_anywhere(home, nproc, seconds, draw)
    done = run_process(home, "--auto", nproc=nproc)
    assert done.returncode == 0, done.stderr


class Campaign:
    """Rounds of one experiment, each with a seed of its own, until enough kills were survived.

    ``undisturbed`` has homes of runs that were never killed, by their seed; those that are missing are run.
    ``training`` is what the experiment has in training.json beside its own. Kills ``anywhere`` come at any instant of
    a life, from the start of its first process on.
    """

    def __init__(
        self,
        folder: Path,
        nproc: int,
        seed: int,
        undisturbed: Mapping[int, Path] | None = None,
        training: Mapping[str, Any] | None = None,
        *,
        anywhere: bool = False,
    ) -> None:
        self._anywhere = anywhere
        self._folder, self._nproc, self._seed = folder, nproc, seed
        self._undisturbed, self._training = undisturbed or {}, training or {}
        self.table = Table(nproc, seed)

    def run(self, num_kills: int) -> Iterator[Life]:
        """Yield every life that was ended by a kill; the table is complete when this is exhausted."""
        while self.table.kills < num_kills:
            self.table.rounds += 1
            home = self._folder / f"round_{self.table.rounds}"
            seed = self._seed + self.table.rounds - 1
            prepare(home, **{**self._training, "seed": seed})
            began = time.monotonic()
            reference = self._undisturbed.get(seed) or self._run_undisturbed(seed)
            seconds = time.monotonic() - began if self._anywhere else None
            for life in survive_kills(home, self._nproc, num_kills - self.table.kills, seed, seconds):
                # A life that is killed after commits of its own has resumed; of others the last one tells.
                if not self._anywhere:
                    self.table.resumed = self.table.kills
                self._count(life)
                if life.was_killed:
                    yield life
            self.table.resumed = self.table.kills
            self._conclude(reference, home)

    def _count(self, life: Life) -> None:
        self.table.kills += life.was_killed
        self.table.kills_inside_a_write += life.was_writing
        self.table.processes_left += len(life.processes_left)
        self.table.problems += life.processes_left

    def _conclude(self, reference: Path, home: Path) -> None:
        difference = first_difference(reference / RESULTS / "data", home / RESULTS / "data")
        duplicated, missing = record_faults(home)
        left = left_over(reference, home)
        self.table.finals_bit_identical += difference is None
        self.table.records_duplicated += duplicated
        self.table.records_missing += missing
        self.table.temporary_files_left += len(left)
        self.table.max_steps_redone = max([self.table.max_steps_redone, *redone_steps(home)])
        self.table.problems += [f"{home.name}: {what}" for what in (difference, *map(str, left)) if what]

    def _run_undisturbed(self, seed: int) -> Path:
        home = self._folder / f"undisturbed_{seed}"
        prepare(home, **{**self._training, "seed": seed})
        done = run_process(home, nproc=self._nproc)
        assert done.returncode == 0, done.stderr
        return home
