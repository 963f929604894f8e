"""Which points a planned batch holds: it follows from the seed and the batch's number alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pipeline.components import Position
from pipeline.system.seeding import keyed_permutation
from pipeline.training.step_plan import BatchRef

_PASSES_KEPT = 2


@dataclass(frozen=True)
class PlannedBatch:
    """One batch: which points it holds, and the key of everything random in it.

    ``position`` is where the training stands when it is run, for datasets and transforms that read it.
    """

    dataset: str
    indices: tuple[int, ...]
    key: tuple[int | str, ...]
    position: Position | None = None


class Points(Protocol):
    """Which points a batch holds."""

    def batch(self, ref: BatchRef) -> PlannedBatch: ...


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


class EndlessPoints:
    """Which points each batch of an endless plan holds: passes one after another, each shuffled by a key of its own.

    A batch may hold the last points of one pass and the first of the next. Passes count from 1, and the first one is
    shuffled as epoch 1 of a plan of passes is.
    """

    def __init__(self, seed: int, split: str, indices: Mapping[str, np.ndarray]) -> None:
        self._seed = seed
        self._split = split
        self._indices = indices
        # By dataset, the passes in use: with batches loaded ahead, these are two at the most.
        self._passes: dict[str, dict[int, np.ndarray]] = {}

    def batch(self, ref: BatchRef) -> PlannedBatch:
        dataset = ref.shape.dataset
        size = ref.shape.batch_size
        first_pass, offset = divmod(ref.number * size, ref.shape.num_points)
        indices = list[int]()
        number = first_pass
        while len(indices) < size:
            indices += self._shuffle(dataset, number + 1)[offset : offset + size - len(indices)].tolist()
            offset = 0
            number += 1
        return PlannedBatch(dataset, tuple(indices), (self._seed, self._split, first_pass + 1, dataset, ref.number))

    def _shuffle(self, dataset: str, number: int) -> np.ndarray:
        """Return the points of a pass in their order."""
        passes = self._passes.setdefault(dataset, {})
        if number not in passes:
            if len(passes) == _PASSES_KEPT:
                del passes[min(passes)]
            order = keyed_permutation(len(self._indices[dataset]), self._seed, self._split, number, dataset)
            passes[number] = self._indices[dataset][order]
        return passes[number]
