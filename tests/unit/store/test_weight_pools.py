"""Committed weights are read whole, from one commit, while a run goes on committing."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.distributed.processes import Processes
from pipeline.paths import ExperimentPaths
from pipeline.progress import EVALUATION, FINISHED, TRAINING, Progress
from pipeline.store.manifest import Entry, Manifest
from pipeline.store.weight_pools import (
    CommitSuperseded,
    HeldFiles,
    epoch_of,
    newest_commit,
    open_commit_on_all_ranks,
    pool_entries,
    steps_of,
)
from tests.support.running import run_inside


@pytest.fixture
def paths(home: Path) -> ExperimentPaths:
    """An experiment that stands before its first training epoch."""
    run_inside(home, "--stop-after-epoch", "0")
    return ExperimentPaths(home, "tiny")


def test_files_that_are_held_outlive_later_commits(paths: ExperimentPaths) -> None:
    """Whatever is committed meanwhile, the weights are those of the commit that was opened."""
    manifest = newest_commit(paths)
    entries = pool_entries(paths, manifest, "last")
    with HeldFiles(paths, manifest, entries["trunk"].values()) as held:
        expected = held.state(entries["trunk"])
        run_inside(paths.home, "--resume")
        found = held.state(entries["trunk"])
    assert all((found[name] == expected[name]).all() for name in expected)


def test_commit_that_overtakes_the_opening_is_read_instead(paths: ExperimentPaths) -> None:
    """If files go between the look at a commit and their opening, the newer commit is taken whole."""
    seen: list[int] = []

    def choose(manifest: Manifest) -> list[Entry]:
        seen.append(manifest.generation)
        entries = [entry for files in pool_entries(paths, manifest, "last").values() for entry in files.values()]
        if len(seen) == 1:
            run_inside(paths.home, "--resume", "--stop-after-epoch", "2")
            with pytest.raises(CommitSuperseded):
                HeldFiles(paths, manifest, [manifest.files["optim_ckps/trunk.pt"], *entries])
            entries.append(manifest.files["optim_ckps/trunk.pt"])
        return entries

    with open_commit_on_all_ranks(paths, Processes(), choose) as (manifest, held):
        assert manifest.generation == seen[-1] > seen[0]
        assert held.state(pool_entries(paths, manifest, "last")["trunk"])


@pytest.mark.parametrize(
    ("pool", "progress", "epoch"),
    [
        ("init", Progress(), 0),
        ("epoch_12", Progress(), 12),
        ("frzn", Progress(), None),
        ("best", Progress(), 7),
        ("last", Progress(EVALUATION, 4), 4),
        ("last", Progress(TRAINING, 4, 2), 3),
        ("last", Progress(FINISHED, 4), 4),
    ],
)
def test_pools_know_their_epoch(pool: str, progress: Progress, epoch: int | None) -> None:
    """The epoch after which weights were taken follows from the pool and where the experiment stands."""
    manifest = Manifest(progress=progress, run_state={"best": {"epoch": 7}})
    assert epoch_of(manifest, pool) == epoch
    assert steps_of(manifest, pool) == (progress.step if pool == "last" else 0)
