"""The plan of the training: pure arithmetic, the same on every rank and for every world size.

A plan says which batches make up a step, from the step's number alone, so a run that continues computes it again
instead of restoring it. Which points are in a batch is in ``batch_points.py``.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np

from pipeline.components import Position
from pipeline.errors import PipelineError
from pipeline.experiment.pymodules.definitions import LoaderArguments
from pipeline.experiment.settings.settings import Settings

# The arithmetic of this file, as a number in every commit: an experiment keeps the plan it started with.
PLAN_VERSION = 1
_MAX_DIFFERENT_STEPS = 100_000


def check_plan_version(saved: int) -> None:
    """Refuse a commit whose batches this version would plan differently."""
    if saved != PLAN_VERSION:
        raise PipelineError(
            f"The experiment was started with version {saved} of the plan of its batches, but this program knows "
            f"{PLAN_VERSION}.\n  fix: continue with the version of training-pipeline that it was started with."
        )


@dataclass(frozen=True)
class SplitShape:
    """All the plan needs to know of a dataset's split."""

    dataset: str
    num_points: int
    batch_size: int
    point_size: int
    # Passes follow each other without an end, so that every batch is full.
    is_endless: bool = False

    @classmethod
    def of(
        cls, dataset: str, indices: Sequence[int] | np.ndarray, arguments: LoaderArguments, *, is_endless: bool = False
    ) -> SplitShape:
        return cls(dataset, len(indices), arguments.batch_size, arguments.point_size, is_endless)

    @property
    def num_batches(self) -> int:
        return -(-self.num_points // self.batch_size)

    def num_items(self, number: int) -> int:
        """Return the number of items in one batch; only the last of a pass may be smaller."""
        if self.is_endless:
            return self.batch_size * self.point_size
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
    """A batch that one rank runs, and its position in the step.

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


Assign = Callable[[list[tuple[int, BatchRef]], int, int], list[BatchAssignment]]


def assign_shares(batches: list[tuple[int, BatchRef]], rank: int, world_size: int) -> list[BatchAssignment]:
    """Assign every rank its share of a step, which it runs at its own pace."""
    return [BatchAssignment(*batches[index]) for index in share_of(len(batches), rank, world_size)]


def assign_rounds(batches: list[tuple[int, BatchRef]], rank: int, world_size: int) -> list[BatchAssignment]:
    """Assign batches in rounds: in each, all ranks run the same dataset, as modules with collectives require.

    Where a dataset has not enough batches for a round, its first one stands in for the missing.
    """
    assignments = []
    for dataset in dict.fromkeys(ref.shape.dataset for _, ref in batches):
        own = [batch for batch in batches if batch[1].shape.dataset == dataset]
        for start in range(0, len(own), world_size):
            group = own[start : start + world_size]
            assignments.append(
                BatchAssignment(*group[rank]) if rank < len(group) else BatchAssignment(*group[0], is_stand_in=True)
            )
    return assignments


class StepPlan(ABC):
    """How batches make up the steps of every epoch. Epochs have ``num_steps`` steps; ``max_steps`` may cut the last."""

    def __init__(self, num_steps: int, max_batches: int, max_steps: int | None) -> None:
        self.num_steps = num_steps
        # The number of batches in the largest step.
        self.max_batches = max_batches
        self.max_steps = max_steps

    @abstractmethod
    def step(self, epoch: int, index: int) -> list[BatchRef]:
        """Return the batches of a step, in the order in which they are assigned to the ranks."""

    @abstractmethod
    def different_steps(self) -> Iterator[list[BatchRef]]:
        """Yield steps until every other step would have as many batches of each dataset as one of them."""

    def steps_of(self, epoch: int) -> int:
        """Return the number of steps in an epoch."""
        return self.steps_through(epoch) - self.steps_through(epoch - 1)

    def steps_through(self, epoch: int) -> int:
        """Return the number of steps in all epochs up to one."""
        steps = max(0, epoch) * self.num_steps
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def position(self, epoch: int, step: int = 0) -> Position:
        """Return the place of a step, which counts from 1; 0 is before the first."""
        return Position(epoch, step, self.steps_through(epoch - 1) + step)

    def position_after(self, epoch: int) -> Position:
        """Return the place of an epoch's evaluation."""
        return Position(epoch, 0, self.steps_through(epoch))

    @property
    def last_epoch(self) -> int | None:
        """The epoch in which ``max_steps`` is reached."""
        return None if self.max_steps is None else -(-self.max_steps // self.num_steps)

    def refs_of(
        self, epoch: int, rank: int, world_size: int, first_step: int, assign: Assign = assign_shares
    ) -> Iterator[BatchRef]:
        """Yield the batches of an epoch that one rank gets, from a step on."""
        for index in range(first_step, self.steps_of(epoch)):
            batches = list(enumerate(self.step(epoch, index)))
            yield from (assignment.ref for assignment in assign(batches, rank, world_size))

    def positions_of(
        self, epoch: int, rank: int, world_size: int, first_step: int, assign: Assign = assign_shares
    ) -> Iterator[Position]:
        """Yield the position of each batch that ``refs_of`` yields."""
        for index in range(first_step, self.steps_of(epoch)):
            batches = list(enumerate(self.step(epoch, index)))
            yield from [self.position(epoch, index + 1)] * len(assign(batches, rank, world_size))


def _interleave(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield dataset and number of every batch, each time from the dataset that has progressed least."""
    waiting = [(0.0, order) for order in range(len(counts))]
    taken = [0] * len(counts)
    while waiting:
        _, order = heapq.heappop(waiting)
        yield order, taken[order]
        taken[order] += 1
        if taken[order] < counts[order]:
            heapq.heappush(waiting, (taken[order] / counts[order], order))


class PassPlan(StepPlan):
    """Every epoch is one pass over all points, with the same steps, filled with other points.

    A step takes batches one by one from the dataset that has progressed least until it holds enough items,
    so that all datasets end together and no point is dropped or repeated.
    """

    def __init__(self, shapes: Sequence[SplitShape], step_min_items: int, max_steps: int | None = None) -> None:
        self._shapes = [shape for shape in shapes if shape.num_points]
        datasets = list[int]()
        numbers = list[int]()
        starts = [0]
        items = 0
        for order, number in _interleave([shape.num_batches for shape in self._shapes]):
            if items >= step_min_items:
                starts.append(len(numbers))
                items = 0
            datasets.append(order)
            numbers.append(number)
            items += self._shapes[order].num_items(number)
        self._datasets = np.asarray(datasets, dtype=np.int32)
        self._numbers = np.asarray(numbers, dtype=np.int64)
        self._starts = np.asarray([*starts, len(numbers)])
        super().__init__(len(starts), int(np.diff(self._starts).max()), max_steps)

    def step(self, epoch: int, index: int) -> list[BatchRef]:
        own = slice(self._starts[index], self._starts[index + 1])
        named = zip(self._datasets[own].tolist(), self._numbers[own].tolist(), strict=True)
        return [BatchRef(self._shapes[dataset], number) for dataset, number in named]

    def different_steps(self) -> Iterator[list[BatchRef]]:
        return (self.step(1, index) for index in range(self.num_steps))


class EndlessPlan(StepPlan):
    """Epochs are stretches of a plan without an end, in which passes follow each other and all batches are full.

    A step takes batches as in ``PassPlan``. The order of the datasets repeats after a period of batches, and so do the
    places in it at which steps begin. One full cycle of steps is computed; every later step is looked up in it.
    """

    def __init__(
        self, shapes: Sequence[SplitShape], step_min_items: int, num_steps: int, max_steps: int | None = None
    ) -> None:
        self._shapes = [shape for shape in shapes if shape.num_points]
        counts = [shape.num_batches for shape in self._shapes]
        divisor = math.gcd(*counts)
        self._counts = [count // divisor for count in counts]
        self._period = list(_interleave(self._counts))
        items = [self._shapes[order].num_items(0) for order, _ in self._period]
        # The number of items before each place of the period, and in all of it.
        self._items = np.cumsum([0, *items])
        self._starts = [0]
        first_seen: dict[int, int] = {}
        while (place := self._starts[-1] % len(self._period)) not in first_seen:
            first_seen[place] = len(self._starts) - 1
            self._starts.append(self._end_of_step(self._starts[-1], step_min_items))
        # From this step on, steps repeat those before, so many batches further on.
        self._first_repeated = first_seen[place]
        max_batches = max(after - before for before, after in pairwise(self._starts))
        super().__init__(num_steps, max_batches, max_steps)

    def _end_of_step(self, start: int, step_min_items: int) -> int:
        """Return the first batch that a step beginning with batch ``start`` does not need."""
        size = len(self._period)
        periods, place = divmod(start, size)
        # Python's integers, which do not overflow.
        wanted = periods * int(self._items[-1]) + int(self._items[place]) + step_min_items
        full, rest = divmod(wanted, int(self._items[-1]))
        return full * size + int(np.searchsorted(self._items, rest))

    def _start_of_step(self, number: int) -> int:
        last = len(self._starts) - 1
        if number <= last:
            return self._starts[number]
        length = last - self._first_repeated
        rounds, rest = divmod(number - self._first_repeated, length)
        shift = self._starts[last] - self._starts[self._first_repeated]
        return self._starts[self._first_repeated + rest] + rounds * shift

    def step(self, epoch: int, index: int) -> list[BatchRef]:
        return self._step((epoch - 1) * self.num_steps + index)

    def _step(self, number: int) -> list[BatchRef]:
        refs = []
        for batch in range(self._start_of_step(number), self._start_of_step(number + 1)):
            periods, place = divmod(batch, len(self._period))
            order, in_period = self._period[place]
            refs.append(BatchRef(self._shapes[order], periods * self._counts[order] + in_period))
        return refs

    def different_steps(self) -> Iterator[list[BatchRef]]:
        return map(self._step, range(len(self._starts) - 1))


class MixturePlan(StepPlan):
    """An endless plan in which weights say how many batches of each dataset a step has, on average.

    With a weight w, step s has floor((s + 1) w) - floor(s w) batches: 1.5 gives one and two in turn.
    """

    def __init__(
        self,
        shapes: Sequence[SplitShape],
        mixture: Mapping[str, float],
        num_steps: int,
        max_steps: int | None = None,
    ) -> None:
        self._shapes = shapes
        # Exactly the decimal number that the settings say, so that no step is off by a rounding error.
        self._weights = [Fraction(repr(mixture[shape.dataset])) for shape in shapes]
        super().__init__(num_steps, sum(map(math.ceil, self._weights)), max_steps)

    def step(self, epoch: int, index: int) -> list[BatchRef]:
        return self._step((epoch - 1) * self.num_steps + index)

    def _step(self, number: int) -> list[BatchRef]:
        firsts = [math.floor(number * weight) for weight in self._weights]
        ends = [math.floor((number + 1) * weight) for weight in self._weights]
        used = [order for order in range(len(firsts)) if ends[order] > firsts[order]]
        taken = _interleave([ends[order] - firsts[order] for order in used])
        return [BatchRef(self._shapes[used[index]], firsts[used[index]] + offset) for index, offset in taken]

    def different_steps(self) -> Iterator[list[BatchRef]]:
        # Weights with many digits repeat only after more steps than anyone trains.
        period = math.lcm(*(weight.denominator for weight in self._weights))
        return map(self._step, range(min(period, self.max_steps or period, _MAX_DIFFERENT_STEPS)))


def create_plan(shapes: Sequence[SplitShape], settings: Settings, max_steps: int | None) -> StepPlan:
    """Return the plan that the settings ask for; ``shapes`` are those of the train splits."""
    num_steps = settings.steps_per_epoch
    if num_steps is None:
        return PassPlan(shapes, settings.step_min_items, max_steps)
    if settings.limit_batches is not None and settings.limit_batches < num_steps:
        if max_steps is not None:
            # A try has as many epochs as the real run.
            max_steps = -(-max_steps // num_steps) * settings.limit_batches
        num_steps = settings.limit_batches
    if settings.mixture is None:
        return EndlessPlan(shapes, settings.step_min_items, num_steps, max_steps)
    return MixturePlan(shapes, settings.mixture, num_steps, max_steps)


def evaluation_refs(shapes: Sequence[SplitShape]) -> list[BatchRef]:
    """Return all batches of an evaluation, in the order in which they are assigned to the ranks."""
    return [BatchRef(shape, number) for shape in shapes for number in range(shape.num_batches)]
