"""What a commit costs when the running epoch has many recorded steps: it must not depend on them."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch

from pipeline.experiment.assembly import Experiment, assemble
from pipeline.experiment.persisted import PersistedParts
from pipeline.experiment.records import Records
from pipeline.experiment.settings import parse_settings, read_contents
from pipeline.paths import ExperimentPaths
from pipeline.progress import TRAINING, Progress
from pipeline.results.lock import RunLock
from pipeline.results.store import ResultsStore
from pipeline.runtime.durable import Disk
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


def measure(rounds: int) -> dict[str, str]:
    """Return the median time of a commit by the number of recorded steps, taken in turns."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        folder = write_experiment(home)
        settings = parse_settings(read_contents(folder / "settings"))
        experiment = assemble(folder / "pymodules", settings, torch.device("cpu"))
        histories = {length: History(home, experiment, length) for length in LENGTHS}
        times = {length: [] for length in LENGTHS}  # type: dict[int, list[float]]
        for _ in range(rounds):
            for length, history in histories.items():
                times[length].append(history.commit())
        for history in histories.values():
            history.lock.release()
    least = statistics.median(times[LENGTHS[0]])
    return {
        f"commit with {length} recorded steps": f"{1000 * statistics.median(seen):.1f} ms "
        f"({statistics.median(seen) / least:.2f} of that with {LENGTHS[0]})"
        for length, seen in times.items()
    }
