"""Sums over the batches of a step, whichever rank runs which batch, and norms of what was summed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

import torch

from pipeline.distributed.processes import Processes
from pipeline.training.step_plan import share_of

Tensors = list[torch.Tensor | None]
# Bytes of one bucket: enough to keep a network busy, little compared with what a step needs anyway.
_BUCKET_BYTES = 4 << 20
# One bucket is packed while those before it travel: to be added, and back.
_MAX_IN_FLIGHT = 3
# The one number that changes nothing when it is added: 0.0 would turn -0.0 into 0.0.
_NEUTRAL = -0.0
# The types of which one kernel computes all norms in float32.
_FOREACH_NORM = (torch.float32, torch.bfloat16, torch.float16)


class BatchSums(Protocol):
    """Adds lists of tensors, shaped like those of ``like``, over the batches of a step, on all ranks."""

    def __init__(self, like: list[torch.Tensor], processes: Processes) -> None: ...

    def begin(self, num_batches: int) -> None:
        """Forget the step before; the next has so many batches on all ranks together."""

    def add(self, tensors: Tensors, num_batches: int = 1) -> None:
        """Take the sum of this rank's next batches; None stands for a tensor that they do not have."""

    def total(self) -> Tensors:
        """Return the sums over all ranks, all of which must ask."""


class PlainSums:
    """Sums each rank's batches in order, then over the ranks: rounding depends on the number of ranks."""

    def __init__(self, like: list[torch.Tensor], processes: Processes) -> None:
        self._like = like
        self._processes = processes

    def begin(self, num_batches: int) -> None:
        # float64 also holds the numbers of batches that BatchNorm counts, exactly.
        self._sums = [torch.zeros_like(tensor, dtype=torch.float64) for tensor in self._like]

    def add(self, tensors: Tensors, num_batches: int = 1) -> None:
        for total, tensor in zip(self._sums, tensors, strict=True):
            if tensor is not None:
                total.add_(tensor)

    def total(self) -> Tensors:
        flat = torch.cat([total.reshape(-1) for total in self._sums])
        parts = self._processes.sum(flat).split([total.numel() for total in self._sums])
        return [part.view_as(like).to(like.dtype) for part, like in zip(parts, self._like, strict=True)]


@dataclass(frozen=True)
class _Piece:
    """A range of the elements of one tensor."""

    tensor: int
    start: int
    stop: int


class TreeSums:
    """Adds along one tree over the batches: the same bits at any number of ranks.

    A rank adds what it can of its own batches, which are neighbours. For the rest, every rank gets a part of all
    tensors from all ranks, adds it up to the root of the tree, and gives the result to all.
    """

    def __init__(self, like: list[torch.Tensor], processes: Processes) -> None:
        self._like = [torch.empty_like(tensor, device="meta") for tensor in like]
        self._processes = processes
        self._device = processes.device
        self._buckets = list(_buckets(self._like, processes.world_size))
        self._memory: dict[tuple[str, int, torch.dtype], torch.Tensor] = {}

    def begin(self, num_batches: int) -> None:
        self._num_batches = num_batches
        self._position = share_of(num_batches, self._processes.rank, self._processes.world_size).start
        self._branches = Branches[Tensors](_add_tensors)
        self._in_flight: deque[Iterator[None]] = deque()
        self._totals: list[torch.Tensor] | None = None

    def add(self, tensors: Tensors, num_batches: int = 1) -> None:
        arranged: Tensors = []
        for tensor, like in zip(tensors, self._like, strict=True):
            if tensor is not None and tensor.stride() != like.stride():
                # Ranks exchange what lies in memory, which must be in the same order on all of them.
                tensor = torch.empty_like(like, device=tensor.device).copy_(tensor)
            arranged.append(tensor)
        self._branches.push(Branch(self._position, num_batches, arranged))
        self._position += num_batches

    def start(self) -> None:
        """Begin to exchange the sums of all ranks; the caller may do something else before it asks for the total."""
        if self._processes.world_size == 1:
            return
        held = [branch.value for branch in self._branches.held]
        self._totals = []
        for index, like in enumerate(self._like):
            # What a rank has summed up is not needed any more once it was sent, so the totals may take its place.
            reusable = (tensors[index] for tensors in held)
            place = next((tensor for tensor in reusable if tensor is not None), None)
            self._totals.append(torch.empty_like(like, device=self._device) if place is None else place)
        for number, bucket in enumerate(self._buckets):
            self._in_flight.append(self._reduce(bucket, held, self._totals, number % _MAX_IN_FLIGHT))
            self._advance()

    def total(self) -> Tensors:
        if self._processes.world_size == 1:
            return self._branches.root()
        if self._totals is None:
            self.start()
        while self._in_flight:
            self._advance()
        return list(self._totals or ())

    def _advance(self) -> None:
        """Advance every in-flight bucket by one phase, newest first, to overlap communication."""
        is_oldest_done = False
        for bucket in reversed(self._in_flight):
            # A bucket yields None as long as it has another phase.
            is_oldest_done = bool(next(bucket, True))
        if is_oldest_done:
            self._in_flight.popleft()

    def _reduce(
        self, bucket: list[_Piece], held: list[Tensors], totals: list[torch.Tensor], slot: int
    ) -> Iterator[None]:
        """Sum one bucket over all batches of all ranks, yielding wherever other buckets can advance."""
        world_size = self._processes.world_size
        by_rank = [branches_of(self._num_batches, rank, world_size) for rank in range(world_size)]
        sent = self._pack(bucket, held, slot)
        received = self._scratch("received", slot, sum(map(len, by_rank)), sent)
        wait = self._processes.all_to_all_async(sent, received, [len(branches) for branches in by_rank])
        yield
        wait()
        # Branches of the ranks follow each other, so this continues each rank's part of the tree up to its root.
        sums = Branches[torch.Tensor](torch.Tensor.add_)
        for branch, row in zip((branch for branches in by_rank for branch in branches), received, strict=True):
            sums.push(Branch(branch.start, branch.size, row))
        # An all-gather as an all-to-all in which every rank gets the same: gloo's own all-gather takes twice as long.
        part = self._scratch("part", slot, world_size, sent).copy_(sums.root())
        whole = self._in_place(bucket, totals)
        whole = self._scratch("whole", slot, world_size, sent) if whole is None else whole
        wait = self._processes.all_to_all_async(part, whole, [1] * world_size)
        yield
        wait()
        *parts, _ = _split(whole.view(-1), bucket)
        for piece, reduced in zip(bucket, parts, strict=True):
            place = _flat(totals[piece.tensor])[piece.start : piece.stop]
            if place.data_ptr() != reduced.data_ptr():
                place.copy_(reduced)

    def _in_place(self, bucket: list[_Piece], tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Return a bucket as rows for each rank where it lies, if it is one piece that can be shared out evenly."""
        (piece, *others) = bucket
        world_size = self._processes.world_size
        tensor = tensors[piece.tensor]
        if others or tensor is None or (piece.stop - piece.start) % world_size:
            return None
        return _flat(tensor)[piece.start : piece.stop].view(world_size, -1)

    def _pack(self, bucket: list[_Piece], held: list[Tensors], slot: int) -> torch.Tensor:
        """Return rows of equal length: for each rank its part of every branch of this rank."""
        in_place = self._in_place(bucket, held[0]) if len(held) == 1 else None
        if in_place is not None:
            return in_place
        world_size = self._processes.world_size
        num_elements = sum(piece.stop - piece.start for piece in bucket)
        dtype = self._like[bucket[0].tensor].dtype
        row_like = torch.empty((1, -(-num_elements // world_size)), dtype=dtype, device="meta")
        rows = self._scratch("branches", slot, world_size * len(held), row_like)
        for row, tensors in zip(rows.view(len(held), world_size * rows.shape[1]), held, strict=True):
            *places, rest = _split(row, bucket)
            rest.fill_(_NEUTRAL)
            for piece, place in zip(bucket, places, strict=True):
                tensor = tensors[piece.tensor]
                if tensor is None:
                    place.fill_(_NEUTRAL)
                else:
                    place.copy_(_flat(tensor)[piece.start : piece.stop])
        if len(held) == 1:
            return rows
        by_rank = rows.view(len(held), world_size, rows.shape[1]).transpose(0, 1)
        return self._scratch("sent", slot, len(rows), rows).view_as(by_rank).copy_(by_rank).view_as(rows)

    def _scratch(self, name: str, slot: int, num_rows: int, like: torch.Tensor) -> torch.Tensor:
        """Return rows in memory that is used again and again: fresh memory costs more than what is done with it."""
        num_elements = num_rows * like.shape[1]
        key = (name, slot, like.dtype)
        if key not in self._memory or len(self._memory[key]) < num_elements:
            self._memory[key] = torch.empty(num_elements, dtype=like.dtype, device=self._device)
        return self._memory[key][:num_elements].view(num_rows, like.shape[1])


def _buckets(like: list[torch.Tensor], world_size: int) -> Iterator[list[_Piece]]:
    """Yield pieces of the tensors, in order, that together have one type and a limited size.

    Pieces of a large tensor can be shared out evenly, so that they may stay where they are.
    """
    bucket = list[_Piece]()
    num_bytes = 0
    for index, tensor in enumerate(like):
        start = 0
        while start < tensor.numel():
            room = (_BUCKET_BYTES - num_bytes) // tensor.element_size() // world_size * world_size
            if bucket and (not room or tensor.dtype != like[bucket[0].tensor].dtype):
                yield bucket
                bucket = []
                num_bytes = 0
                continue
            stop = min(tensor.numel(), start + room)
            bucket.append(_Piece(index, start, stop))
            num_bytes += (stop - start) * tensor.element_size()
            start = stop
    if bucket:
        yield bucket


def _split(elements: torch.Tensor, bucket: list[_Piece]) -> list[torch.Tensor]:
    """Return the places of the pieces of a bucket among its elements, and what is left."""
    sizes = [piece.stop - piece.start for piece in bucket]
    return list(elements.split([*sizes, len(elements) - sum(sizes)]))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _add_tensors(left: Tensors, right: Tensors) -> Tensors:
    """Add the right tensors to the left ones, in place; where one of the two is absent, the other is the sum."""
    pairs = list(zip(left, right, strict=True))
    both = [(total, other) for total, other in pairs if total is not None and other is not None]
    if both:
        torch._foreach_add_([total for total, _ in both], [other for _, other in both])
    return [other if total is None else total for total, other in pairs]


Value = TypeVar("Value")


@dataclass(frozen=True)
class Branch(Generic[Value]):
    """The sum of all batches below one branch of the tree: ``size`` of them from ``start`` on."""

    start: int
    size: int
    value: Value

    def is_left_of(self, other: Branch[Value]) -> bool:
        """Return whether the two are the halves of one branch."""
        are_neighbours = self.start + self.size == other.start
        return are_neighbours and self.size == other.size and self.start % (2 * self.size) == 0


class Branches(Generic[Value]):
    """Neighbouring branches, from left to right; two halves become a whole as soon as both are there.

    So there are never more than about twice as many as the logarithm of the number of batches.
    """

    def __init__(self, add: Callable[[Value, Value], Value]) -> None:
        self._add = add
        self.held: list[Branch[Value]] = []

    def push(self, branch: Branch[Value]) -> None:
        """Take the branch that follows the last one."""
        while self.held and self.held[-1].is_left_of(branch):
            left = self.held.pop()
            branch = Branch(left.start, 2 * left.size, self._add(left.value, branch.value))
        self.held.append(branch)

    def root(self) -> Value:
        """Return the sum of all, once nothing follows any more."""
        *rest, last = self.held
        value = last.value
        for branch in reversed(rest):
            value = self._add(branch.value, value)
        return value


def _add_nothing(left: None, right: None) -> None:
    """Add branches of which only the shape of the tree is wanted."""


@lru_cache(maxsize=1024)
def branches_of(num_batches: int, rank: int, world_size: int) -> tuple[Branch[None], ...]:
    """Return the branches whose sums one rank can make of its own batches of a step."""
    branches = Branches[None](_add_nothing)
    for position in share_of(num_batches, rank, world_size):
        branches.push(Branch(position, 1, None))
    return tuple(branches.held)


def gradient_norms(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the norm of each gradient, as float32."""
    if all(gradient.dtype in _FOREACH_NORM and not gradient.is_sparse for gradient in gradients):
        return list(torch._foreach_norm(gradients, dtype=torch.float32)) if gradients else []
    norms = []
    for gradient in gradients:
        # A sparse gradient may list an index twice; only the coalesced values are its elements.
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        norms.append(torch.linalg.vector_norm(values).to(torch.float32))
    return norms
