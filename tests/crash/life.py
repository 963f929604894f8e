"""The life of a results folder without any training: opened, committed to, tidied up, given back."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.lifecycle.frozen_copy import copy_folder, digest_folder
from pipeline.lifecycle.mode import inspect_results
from pipeline.lifecycle.reset import open_fresh
from pipeline.paths import ExperimentPaths
from pipeline.progress import FINISHED, TRAINING, Progress
from pipeline.store.changes import Changes
from pipeline.store.lock import RunLock
from pipeline.store.store import ResultsStore, is_settled
from pipeline.store.verify import inspect
from pipeline.system.disk import Disk, bytes_writer

NUM_COMMITS = 5


def make(home: Path) -> ExperimentPaths:
    """Return an experiment with a small settings folder and nothing else."""
    paths = ExperimentPaths(home, "store")
    for name in ("pymodules/modules/m.py", "settings/training.json"):
        (paths.settings / name).parent.mkdir(parents=True, exist_ok=True)
        (paths.settings / name).write_text("{}")
    (home / "experiment_results").mkdir()
    return paths


def changes(number: int) -> Changes:
    """Return a commit with everything a commit can have; its content tells its number."""

    def save(folder: Path) -> None:
        (folder / "inner").mkdir()
        (folder / "empty").mkdir()
        (folder / "inner" / "state.json").write_text(json.dumps(number))

    dropped = {f"pools/epoch_{number - 2}/m.pt"} if number > 2 else set()
    segments = {f"running/{number}": bytes_writer(b"segment")} if number % 2 else {}
    return Changes(
        files={"pools/last/m.pt": bytes_writer(str(number).encode() * 1000), **segments},
        folders={"component": save},
        same_as={f"pools/epoch_{number}/m.pt": "pools/last/m.pt"},
        removed=dropped | ({f"running/{number - 1}"} if number % 2 == 0 else set()),
        sealed={f"records/step_data_{number}.npz": bytes_writer(b"sealed %d" % number)},
        is_partial=number == 3,
        num_bytes=1000,
    )


def place(number: int) -> Progress:
    return Progress(FINISHED if number == NUM_COMMITS else TRAINING, number)


def is_needed(path: str) -> bool:
    return path.startswith(("pools/last", "component"))


@dataclass
class Life:
    """What one life has been told: which commit it found, and which ones it was promised."""

    store_class: type[ResultsStore] = ResultsStore
    found: int = 0
    promised: int = 0
    held: list[RunLock] = field(default_factory=list)

    def live(self, paths: ExperimentPaths, disk: Disk) -> None:
        """Begin or continue, commit what is left to commit, and give the experiment back."""
        lock = RunLock(paths, disk)
        self.held.append(lock)
        try:
            self._use(paths, disk, lock)
        finally:
            lock.release()

    def _use(self, paths: ExperimentPaths, disk: Disk, lock: RunLock) -> None:
        store = self.store_class(paths, disk, lock.claim)
        if inspect_results(paths).exists:
            lock.acquire()
            store.recover(is_needed)
        else:
            open_fresh(paths, disk, lock)
            sources = digest_folder(paths.settings)
            store.set_digests(copy_folder(paths.settings, paths.results, sources, {}, disk), sources)
        self.found = self.promised = store.current.progress.epoch
        for number in range(self.found + 1, NUM_COMMITS + 1):
            store.commit(changes(number), place(number), {"number": number})
            self.promised = number

    def end(self) -> None:
        """Let go of what a dead process cannot hold any more."""
        for lock in self.held:
            lock._has_ended.set()
            lock._lock.release(force=True)


def survive(paths: ExperimentPaths, promised: int, store_class: type[ResultsStore] = ResultsStore) -> None:
    """Live on after a fault and check every promise: nothing promised is lost, nothing is half, nothing is left."""
    life = Life(store_class)
    life.live(paths, Disk())
    assert promised <= life.found <= promised + 1, f"commit {promised} was promised, but {life.found} was found"
    check(paths)


def check(paths: ExperimentPaths, *, allows_empty_folders: bool = False) -> None:
    """The folder is as if nothing had ever happened, to the last name and the last bit."""
    found = {path.relative_to(paths.data).as_posix(): path.read_bytes() for path in paths.data.rglob("*.*")}
    assert found == expected(), f"data/ differs in {sorted(set(found.items()) ^ set(expected().items()))[:3]}"
    assert not list(paths.temp_data.iterdir())
    assert is_settled(paths)
    inspection = inspect(paths, is_needed)
    assert inspection.is_clean, inspection
    assert len(inspection.intact) >= 2
    folders = [path for path in paths.results.rglob("*") if path.is_dir() and path.parent != paths.results]
    assert allows_empty_folders or all(any(folder.iterdir()) for folder in folders)


def expected() -> dict[str, bytes]:
    """What data/ holds after the last commit."""
    last = str(NUM_COMMITS).encode() * 1000
    kept = (NUM_COMMITS - 1, NUM_COMMITS)
    pools = {f"pools/epoch_{number}/m.pt": str(number).encode() * 1000 for number in kept}
    records = {f"records/step_data_{number}.npz": b"sealed %d" % number for number in range(1, NUM_COMMITS + 1)}
    return {"pools/last/m.pt": last, "component/inner/state.json": b"%d" % NUM_COMMITS, **pools, **records}
