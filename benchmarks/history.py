"""What a step and a commit cost when the running epoch has many recorded steps: it must not depend on them."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.driver import PIPELINE
from benchmarks.rows import Row, Spread, ratios
from pipeline.checkpoint.parts import PersistedParts
from pipeline.checkpoint.records import Records
from pipeline.distributed.processes import Processes
from pipeline.experiment.assembly import Experiment, assemble
from pipeline.experiment.settings.settings import parse_settings, read_contents
from pipeline.paths import ExperimentPaths
from pipeline.progress import TRAINING, Progress
from pipeline.session import build_session
from pipeline.store.lock import RunLock
from pipeline.store.store import ResultsStore
from pipeline.system.disk import Disk
from pipeline.training.engines.base import StepRequests
from pipeline.training.training import StepReport
from tests.support.experiments import write_experiment

LENGTHS = (10, 10_000, 1_000_000)
_NEW = 5


class History:
    """A store whose running epoch has so many committed steps already."""

    def __init__(self, home: Path, experiment: Experiment, num_steps: int) -> None:
        self._records = Records(experiment.settings.loss_registers, experiment.learning_rates())
        self._parts = PersistedParts(experiment, self._records)
        paths = ExperimentPaths(home / str(num_steps), "tiny")
        for folder in (paths.data, paths.generations):
            folder.mkdir(parents=True)
        self.lock = RunLock(paths)
        self.lock.acquire()
        self._store = ResultsStore(paths, Disk(), self.lock.claim)
        self._add(num_steps)
        self.commit()

    def _add(self, count: int) -> None:
        for column in {**self._records._columns(), **self._records._loss_columns()}.values():
            column.extend([1] * count)

    def commit(self) -> float:
        """Add a few steps, commit and return how long that took."""
        self._add(_NEW)
        started = time.perf_counter()
        self._store.commit(self._parts.running_epoch(), Progress(TRAINING, 1, self._records.num_steps), {})
        return time.perf_counter() - started


class LongEpoch:
    """A training stage inside an epoch that has so many recorded steps already."""

    def __init__(self, paths: ExperimentPaths, experiment: Experiment, num_steps: int) -> None:
        self._machinery = build_session(
            paths, Processes(), experiment, ResultsStore(paths, Disk(), RunLock(paths).claim)
        )
        self._machinery.experiment.create_module_transforms()
        self._machinery.engine.prepare()
        self._steps = self._run()
        next(self._steps)
        self._machinery.training.flush()
        records = self._machinery.records
        for column in {**records._columns(), **records._loss_columns()}.values():
            column.extend(list(column[-1:]) * (num_steps - 1))

    def _run(self) -> Iterator[StepReport]:
        """Take the steps of an epoch again and again without ever ending it."""
        yield next(self._machinery.training.run(1, 0, StepRequests))
        while True:
            for report in self._machinery.training.run(1, 1, StepRequests):
                yield report
                if report.step == report.num_steps:
                    break

    def step(self) -> float:
        """Take a few steps, let their losses be recorded and return how long one took."""
        started = time.perf_counter()
        for _ in itertools.islice(self._steps, _NEW):
            pass
        self._machinery.training.flush()
        return (time.perf_counter() - started) / _NEW

    def close(self) -> None:
        self._machinery.close()


def measure(rounds: int) -> list[Row]:
    """Return the rows of steps and commits by the number of recorded steps, taken in turns."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        folder = write_experiment(home)
        settings = parse_settings(read_contents(folder / "settings"))
        experiment = assemble(folder / "pymodules", settings, torch.device("cpu"))
        commits = {length: History(home, experiment, length) for length in LENGTHS}
        epochs = {length: LongEpoch(ExperimentPaths(home, "tiny"), experiment, length) for length in LENGTHS}
        rows = [
            _row("step", {length: one.step for length, one in epochs.items()}, 10 * rounds),
            _row("commit", {length: one.commit for length, one in commits.items()}, rounds),
        ]
        for epoch in epochs.values():
            epoch.close()
        for history in commits.values():
            history.lock.release()
    return rows


def _row(what: str, acts: dict[int, Callable[[], float]], rounds: int) -> Row:
    times: dict[int, list[float]] = {length: [] for length in LENGTHS}
    for _ in range(rounds):
        for length, act in acts.items():
            times[length].append(act())
    few, many = times[LENGTHS[0]], times[LENGTHS[-1]]
    milliseconds = {length: Spread.of(1000 * one for one in seen) for length, seen in times.items()}
    label = f"i  {what} with 10⁶ recorded steps, of that with 10"
    return Row(label, "flat", {PIPELINE: ratios(many, few)}, {"ms": milliseconds})
