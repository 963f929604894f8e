"""Loaders: a point looks the same whoever loads it."""

from __future__ import annotations

import multiprocessing
import random
import subprocess
import sys
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import default_collate

from pipeline.distributed.collectives import _guard
from pipeline.errors import PipelineError
from pipeline.experiment.pymodules.definitions import LoaderArguments
from pipeline.training.batch_points import PlannedBatch
from pipeline.training.loaders import KeyedDataset, Loader, Prefetcher, to_device

CPU = torch.device("cpu")
BATCHES = [PlannedBatch("a", (3, 1, 4), (0, "train", 1, "a", 0)), PlannedBatch("a", (1, 5), (0, "train", 1, "a", 1))]


class Numbers:
    """A dataset of dict points."""

    def __getitem__(self, idx: int) -> dict[str, Any]:
        return {"idx": idx}


class ManyNumbers(Numbers):
    """A dataset that fetches many points at once."""

    def __getitems__(self, idxs: list[int]) -> list[dict[str, Any]]:
        return [{"idx": 100 + idx} for idx in idxs]


def augmented(point: dict[str, Any]) -> None:
    """Edit a point in place with draws from all three generators."""
    point["noise"] = [random.random(), np.random.rand(), torch.rand(()).item()]


def loaded(transform: Any, num_workers: int = 0, dataset: Any = None, batches: Any = BATCHES) -> list[Any]:
    """Return all batches as a loader gives them."""
    keyed = KeyedDataset(dataset or Numbers(), transform, default_collate)
    loader = Loader(keyed, LoaderArguments(batch_size=3, num_workers=num_workers), CPU)
    return [loaded.batch for loaded in loader.load(batches)]


def test_batches_come_in_the_planned_order() -> None:
    """The plan decides which points make a batch."""
    assert [batch["idx"].tolist() for batch in loaded(lambda point: point)] == [[3, 1, 4], [1, 5]]


def test_transform_may_return_a_new_point() -> None:
    """What a transform returns takes the place of the point."""
    assert loaded(lambda point: {"x": point["idx"] * 2})[0]["x"].tolist() == [6, 2, 8]


def test_transform_may_edit_in_place() -> None:
    """A transform that returns nothing has edited the point."""
    assert "noise" in loaded(augmented)[0]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_number_of_workers_changes_nothing(num_workers: int) -> None:
    """Points drawn in workers have the same bits as points drawn here."""
    alone, beside = loaded(augmented), loaded(augmented, num_workers)
    for left, right in zip(alone, beside, strict=True):
        assert torch.equal(torch.stack(left["noise"]), torch.stack(right["noise"]))


def test_point_does_not_depend_on_the_batches_before() -> None:
    """A resumed epoch that begins with the second batch draws the same numbers for it."""
    assert torch.equal(
        torch.stack(loaded(augmented)[1]["noise"]), torch.stack(loaded(augmented, batches=BATCHES[1:])[0]["noise"])
    )


def test_points_of_a_batch_draw_different_numbers() -> None:
    """Each point has a key of its own, even if the same point comes twice."""
    twice = [PlannedBatch("a", (7, 7), (0,))]
    assert len(set(loaded(augmented, batches=twice)[0]["noise"][0].tolist())) == 2


def test_dataset_may_fetch_many_points_at_once() -> None:
    """A dataset that defines __getitems__ is asked once per batch."""
    assert loaded(lambda point: point, dataset=ManyNumbers())[0]["idx"].tolist() == [103, 101, 104]


def test_loading_leaves_the_loaders_batches_replaceable() -> None:
    """One loader serves epoch after epoch."""
    loader = Loader(KeyedDataset(Numbers(), lambda point: point, default_collate), LoaderArguments(3), CPU)
    first = [loaded.batch["idx"].tolist() for loaded in loader.load(BATCHES)]
    second = [loaded.batch["idx"].tolist() for loaded in loader.load(BATCHES[1:])]
    assert (first, second) == ([[3, 1, 4], [1, 5]], [[1, 5]])


def test_moving_to_a_device_keeps_the_shape_of_a_batch() -> None:
    """Tensors in dicts, lists, tuples and named tuples are moved, everything else is left."""
    pair = namedtuple("pair", "x y")
    batch = {"a": [torch.ones(1)], "b": (torch.ones(1), "text"), "c": pair(torch.ones(1), 3)}
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"][0].is_meta
    assert moved["b"][0].is_meta
    assert moved["b"][1] == "text"
    assert isinstance(moved["c"], pair)
    assert moved["c"].x.is_meta


STUCK = """
import time
import torch
from pipeline.experiment.pymodules.definitions import LoaderArguments
from pipeline.training.loaders import KeyedDataset, Loader
from pipeline.training.batch_points import PlannedBatch


class Stuck:
    def __getitem__(self, index):
        print("stuck", flush=True)
        time.sleep(60)


loader = Loader(KeyedDataset(Stuck(), lambda point: None, list), LoaderArguments(1, num_workers=1), torch.device("cpu"))
next(loader.load([PlannedBatch("a", (0,), (0,))]))
"""


def test_worker_ends_with_its_process() -> None:
    """A worker that hangs in an author's code is gone as soon as the process it works for was killed."""
    owner = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "stuck\n"
    owner.kill()
    # The pipe stays open for as long as anyone is alive who has inherited it.
    owner.communicate(timeout=30)


# The first so many forks hang before Python runs in the child, as they do when a lock was copied that a thread held.
HANGING = """
import os
import sys
import time
import torch
from pipeline.errors import PipelineError
from pipeline.experiment.pymodules.definitions import LoaderArguments
from pipeline.training import loaders
from pipeline.training.batch_points import PlannedBatch

num_hanging = int(sys.argv[1])
num_forks = 0


def count():
    global num_forks
    num_forks += 1


def hang():
    while num_forks <= num_hanging:
        time.sleep(1)


class Numbers:
    def __getitem__(self, index):
        return index


os.register_at_fork(before=count, after_in_child=hang)
loaders.SECONDS_TO_START = 2.0
arguments = LoaderArguments(1, num_workers=2, persistent_workers=sys.argv[2] == "True")
loader = loaders.Loader(loaders.KeyedDataset(Numbers(), lambda point: None, list), arguments, torch.device("cpu"))
batches = [PlannedBatch("a", (index,), (index,)) for index in range(5)]
try:
    print([[loaded.batch for loaded in loader.load(batches)] for _ in range(2)])
except PipelineError as error:
    print(error)
loader.close()
"""


def run_hanging(num_hanging: int, keeps: bool) -> str:
    """Load two epochs in a process whose first forks hang; return what it says."""
    line = [sys.executable, "-c", HANGING, str(num_hanging), str(keeps)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("keeps", [True, False])
def test_worker_that_hangs_in_its_fork_is_replaced(keeps: bool) -> None:
    """A lock that a thread held at the fork costs seconds, not the run, and every batch comes once."""
    epoch = [[index] for index in range(5)]
    assert run_hanging(1, keeps) == f"{[epoch, epoch]}\n"


def test_workers_that_always_hang_end_the_run_with_a_sentence() -> None:
    """Trying for ever would be a hang as well."""
    assert "must start within 2 s, but one did not in 3 attempts" in run_hanging(100, keeps=False)


def test_next_batch_can_be_loaded_before_it_is_asked_for() -> None:
    """Loading ahead changes neither the order nor the number of batches."""
    loaded: list[int] = []
    ahead = Prefetcher(loaded.append(number) or number for number in range(3))  # type: ignore[func-returns-value]
    ahead.load()
    ahead.load()
    assert loaded == [0]
    assert [next(ahead), next(ahead), next(ahead)] == [0, 1, 2]
    ahead.load()
    with pytest.raises(StopIteration):
        next(ahead)


def test_error_of_a_batch_that_is_loaded_ahead_is_raised_when_it_is_asked_for() -> None:
    """The step that is under way meanwhile is not disturbed."""
    ahead = Prefetcher(1 // number for number in (1, 0))
    assert next(ahead) == 1
    ahead.load()
    with pytest.raises(ZeroDivisionError):
        next(ahead)


def test_batches_of_a_step_can_be_looked_at_before_they_are_asked_for() -> None:
    """What was loaded ahead already is not loaded again, and all of it is still to come."""
    ahead = Prefetcher(iter(range(4)))
    ahead.load()
    assert ahead.look_ahead(3) == [0, 1, 2]
    # A step in which this rank has no batch leaves what was loaded for a later one.
    assert ahead.look_ahead(0) == []
    assert [*ahead] == [0, 1, 2, 3]


def test_error_is_raised_when_its_batch_is_looked_at() -> None:
    """A step whose items must be counted needs all of its batches at once."""
    ahead = Prefetcher(1 // number for number in (1, 0))
    with pytest.raises(ZeroDivisionError):
        ahead.look_ahead(2)


def test_items_are_counted_where_a_batch_is_collated() -> None:
    """The counts come with the batch, also from a worker."""
    keyed = KeyedDataset(Numbers(), lambda point: point, default_collate, lambda batch: int(batch["idx"].sum()))
    for num_workers in (0, 1):
        loader = Loader(keyed, LoaderArguments(batch_size=3, num_workers=num_workers), CPU)
        assert [loaded.counts for loaded in loader.load(BATCHES)] == [8, 6]


def test_time_of_loading_counts_whenever_it_is_done() -> None:
    """Ahead or when it is asked for: what loading takes is known."""
    ahead = Prefetcher(iter(range(2)))
    ahead.load()
    after_first = ahead.seconds
    assert after_first > 0
    assert [*ahead] == [0, 1]
    assert ahead.seconds > after_first


@pytest.mark.parametrize("keeps", [True, False])
def test_workers_start_before_the_first_batch_is_asked_for(keeps: bool) -> None:
    """Whoever loads knows when processes are forked, and whether there will be any."""
    arguments = LoaderArguments(batch_size=3, num_workers=1, persistent_workers=keeps)
    loader = Loader(KeyedDataset(Numbers(), lambda point: point, default_collate), arguments, CPU)
    before = set(multiprocessing.active_children())
    assert loader.starts_workers
    batches = loader.load(BATCHES)
    assert len(set(multiprocessing.active_children()) - before) == 1
    assert loader.starts_workers is not keeps
    assert len(list(batches)) == 2


def test_collective_while_loading_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks load other batches at other times: a collective in a transform would wait for ever."""
    monkeypatch.setattr(dist, "barrier", _guard("barrier", lambda: None))
    with pytest.raises(PipelineError, match=r"datasets/a.py.* calls torch.distributed.barrier"):
        loaded(lambda point: dist.barrier() or point)
