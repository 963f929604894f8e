"""The plan of an epoch: pure arithmetic, the same on every rank and for every world size."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeline.experiment.pymodules.definitions import LoaderArguments
from pipeline.system.seeding import keyed_permutation


@dataclass(frozen=True)
class PlannedBatch:
    """One batch: which points it holds, and the key of everything random in it."""

    dataset: str
    indices: tuple[int, ...]
    key: tuple[int | str, ...]


@dataclass(frozen=True)
class SplitShape:
    """All the plan needs to know of a dataset's split."""

    dataset: str
    num_points: int
    batch_size: int
    point_size: int

    @classmethod
    def of(cls, dataset: str, indices: Sequence[int] | np.ndarray, arguments: LoaderArguments) -> SplitShape:
        return cls(dataset, len(indices), arguments.batch_size, arguments.point_size)

    @property
    def num_batches(self) -> int:
        return -(-self.num_points // self.batch_size)

    def num_items(self, number: int) -> int:
        """Return the number of items in one batch; only the last may be smaller."""
        return min(self.batch_size, self.num_points - number * self.batch_size) * self.point_size


@dataclass(frozen=True)
class BatchRef:
    """Where a batch stands: which batch of which dataset."""

    shape: SplitShape
    number: int

    @property
    def num_items(self) -> int:
        return self.shape.num_items(self.number)


@dataclass(frozen=True)
class BatchAssignment:
    """A batch that one rank runs, and its position among those that are dealt.

    A stand-in counts for nothing: it keeps a rank without a batch in step with those that have one.
    """

    position: int
    ref: BatchRef
    is_stand_in: bool = False


def share_of(num_batches: int, rank: int, world_size: int) -> range:
    """Return which batches of a step one rank gets: neighbours, which can be added up before ranks talk.

    Datasets take turns in a step, so neighbours also share out an expensive dataset more evenly than every n-th batch.
    """
    size, rest = divmod(num_batches, world_size)
    start = rank * size + min(rank, rest)
    return range(start, start + size + (rank < rest))


Deal = Callable[[list[tuple[int, BatchRef]], int, int], list[BatchAssignment]]


def assign_shares(batches: list[tuple[int, BatchRef]], rank: int, world_size: int) -> list[BatchAssignment]:
    """Deal every rank its share of a step, which it runs at its own pace."""
    return [BatchAssignment(*batches[index]) for index in share_of(len(batches), rank, world_size)]


def assign_rounds(batches: list[tuple[int, BatchRef]], rank: int, world_size: int) -> list[BatchAssignment]:
    """Assign batches in rounds: in each, all ranks run the same dataset, as modules with collectives require.

    Where a dataset has not enough batches for a round, its first one stands in for the missing.
    """
    assignments = []
    for dataset in dict.fromkeys(ref.shape.dataset for _, ref in batches):
        own = [batch for batch in batches if batch[1].shape.dataset == dataset]
        for start in range(0, len(own), world_size):
            dealt = own[start : start + world_size]
            assignments.append(
                BatchAssignment(*dealt[rank]) if rank < len(dealt) else BatchAssignment(*dealt[0], is_stand_in=True)
            )
    return assignments


class StepPlan:
    """How batches make up steps; every epoch of an experiment has the same steps, filled with other points.

    A step takes batches one by one from the dataset that has progressed least until it holds enough items,
    so that all datasets end together and no point is dropped or repeated.
    """

    def __init__(self, shapes: Sequence[SplitShape], step_min_items: int) -> None:
        self._shapes = [shape for shape in shapes if shape.num_points]
        self._datasets, self._numbers, starts = self._deal(step_min_items)
        self._starts = np.asarray([*starts, len(self._numbers)])

    def _deal(self, step_min_items: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
        waiting = [(0.0, order) for order in range(len(self._shapes))]
        taken = [0] * len(self._shapes)
        datasets = list[int]()
        numbers = list[int]()
        starts = [0]
        items = 0
        while waiting:
            _, order = heapq.heappop(waiting)
            shape = self._shapes[order]
            if items >= step_min_items:
                starts.append(len(numbers))
                items = 0
            datasets.append(order)
            numbers.append(taken[order])
            items += shape.num_items(taken[order])
            taken[order] += 1
            if taken[order] < shape.num_batches:
                heapq.heappush(waiting, (taken[order] / shape.num_batches, order))
        return np.asarray(datasets, dtype=np.int32), np.asarray(numbers, dtype=np.int64), starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    def step(self, index: int) -> list[BatchRef]:
        """Return the batches of a step, in the order in which they are dealt to the ranks."""
        own = slice(self._starts[index], self._starts[index + 1])
        named = zip(self._datasets[own].tolist(), self._numbers[own].tolist(), strict=True)
        return [BatchRef(self._shapes[dataset], number) for dataset, number in named]

    @cached_property
    def max_batches(self) -> int:
        """The number of batches in the largest step."""
        return int(np.diff(self._starts).max())

    def refs_of(self, rank: int, world_size: int, first_step: int, deal: Deal = assign_shares) -> Iterator[BatchRef]:
        """Yield the batches one rank gets, from a step on."""
        for index in range(first_step, len(self)):
            yield from (assignment.ref for assignment in deal(list(enumerate(self.step(index))), rank, world_size))


class EpochPoints:
    """Which points each batch of one epoch holds: a split shuffled by key to train on it, or in order."""

    def __init__(
        self, seed: int, epoch: int, split: str, indices: Mapping[str, np.ndarray], *, is_shuffled: bool
    ) -> None:
        self._key = (seed, split, epoch)
        self._is_shuffled = is_shuffled
        self._indices = indices
        self._ordered: dict[str, np.ndarray] = {}

    def batch(self, ref: BatchRef) -> PlannedBatch:
        dataset = ref.shape.dataset
        number = ref.number
        size = ref.shape.batch_size
        indices = self._in_order(dataset)[number * size : (number + 1) * size]
        return PlannedBatch(dataset, tuple(indices.tolist()), (*self._key, dataset, number))

    def _in_order(self, dataset: str) -> np.ndarray:
        if not self._is_shuffled:
            return self._indices[dataset]
        if dataset not in self._ordered:
            order = keyed_permutation(len(self._indices[dataset]), *self._key, dataset)
            self._ordered[dataset] = self._indices[dataset][order]
        return self._ordered[dataset]


def evaluation_refs(shapes: Sequence[SplitShape]) -> list[BatchRef]:
    """Return all batches of an evaluation, in the order in which they are dealt to the ranks."""
    return [BatchRef(shape, number) for shape in shapes for number in range(shape.num_batches)]
