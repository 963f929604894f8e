"""Losses that couple all rows of a step, such as SimCLR's and CLIP's: two passes over a step's batches (GradCache)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from pipeline.distributed.processes import Processes
from pipeline.errors import PipelineError
from pipeline.experiment.assembly import Experiment
from pipeline.training.batch_runner import BatchRunner, Key, is_out_of_memory, out_of_memory_explained
from pipeline.training.buffers import preserved_buffers
from pipeline.training.engines.base import GradientEngine
from pipeline.training.loaders import LoadedBatch, Prefetcher
from pipeline.training.rows import RowKind, Rows, as_float32, kinds_of, row_bytes
from pipeline.training.step_plan import BatchAssignment, BatchRef, assign_shares

_Weighted = tuple[nn.Parameter, torch.Tensor]


@dataclass
class _CoupledRows:
    """The rows of one dataset in a step, in plan order, and what the loss over them gave."""

    rows: Rows
    # By the position of a batch in the step.
    slices: dict[int, slice]
    losses: dict[str, torch.Tensor] = field(default_factory=dict)
    row_gradients: Rows = field(default_factory=dict)
    # The gradients of weights that loss itself uses, which only the rank of the first batch has.
    weight_gradients: list[_Weighted] = field(default_factory=list)


class WholeStep:
    """Computes the losses of module transforms that define ``embed`` and ``loss``::

        begin_step:  embed this rank's batches without gradient
                     exchange the rows of all ranks, in one all-gather
                     compute the loss over all rows, and its gradient at each row
        for each batch:
            losses       what the loss gave for its rows
            roots        embed it again, now with gradient, which continues that of its rows

    Every rank that has a batch computes the same loss over the same rows in the same order, so that nothing depends on
    the number of ranks. No graph but that of one batch is ever held.
    """

    def __init__(
        self,
        experiment: Experiment,
        processes: Processes,
        runner: BatchRunner,
        engine: GradientEngine,
    ) -> None:
        self._experiment = experiment
        self._processes = processes
        self._runner = runner
        self._engine = engine
        transforms = experiment.components.module_transforms.items()
        self._datasets = frozenset(name for name, definition in transforms if definition.is_whole_step)
        # What the rows of each dataset are; all ranks learn it when a dataset has its first step in this process.
        self._kinds: dict[str, tuple[RowKind, ...]] = {}
        self._coupled: dict[str, _CoupledRows] = {}
        self._one = torch.ones((), device=processes.device)

    def covers(self, ref: BatchRef) -> bool:
        """Return whether the loss of this batch is one of all rows of its step."""
        return ref.shape.dataset in self._datasets

    def begin_step(
        self,
        key: Key,
        batches: list[BatchRef],
        assignments: list[BatchAssignment],
        loading: Prefetcher[LoadedBatch],
        scales: Mapping[str, float],
    ) -> None:
        """Do the first pass over a step, and compute its losses and their gradients; called by all ranks."""
        if not self._datasets:
            return
        self._coupled.clear()
        positions: dict[str, list[int]] = {}
        for position, ref in enumerate(batches):
            if self.covers(ref):
                positions.setdefault(ref.shape.dataset, []).append(position)
        if not positions:
            return
        own = self._embed(key, assignments, loading)
        self._learn_kinds(batches, own)
        by_position = self._exchange(batches, own)
        for dataset, chosen in positions.items():
            rows = {
                kind.name: torch.cat([by_position[position][kind.name] for position in chosen])
                for kind in self._kinds[dataset]
            }
            coupled = self._coupled[dataset] = _CoupledRows(as_float32(rows), _slices(batches, chosen))
            # A rank without a batch of this dataset has nothing to do with the gradients.
            if any(position in own for position in chosen):
                is_owner = chosen[0] in own
                with _loss_explained(dataset, len(next(iter(rows.values())))):
                    self._compute_loss(coupled, batches[chosen[0]], (*key, "loss", dataset), scales, is_owner=is_owner)

    def _embed(self, key: Key, assignments: list[BatchAssignment], loading: Prefetcher[LoadedBatch]) -> dict[int, Rows]:
        """Return the rows of this rank's batches by position, without a trace in the modules."""
        modules = self._experiment.components.all_modules.values()
        rows = {}
        for given, loaded in zip(assignments, loading.look_ahead(len(assignments)), strict=True):
            if not self.covers(given.ref):
                continue
            # Each batch begins with the buffers of the step's start, as it will in the second pass.
            with (
                torch.no_grad(),
                preserved_buffers(modules),
                out_of_memory_explained(loaded.batch, given.ref, self._processes.device),
            ):
                embedded = self._runner.embed(loaded, given.ref, (*key, given.position))
            rows[given.position] = {name: row.detach() for name, row in embedded.items()}
        return rows

    def _learn_kinds(self, batches: list[BatchRef], own: dict[int, Rows]) -> None:
        """Let all ranks know what the rows of each dataset are, also those without a batch of it."""
        datasets = {ref.shape.dataset for ref in batches if self.covers(ref)}
        if not datasets <= set(self._kinds):
            found = {batches[position].shape.dataset: kinds_of(rows) for position, rows in own.items()}
            for kinds in self._processes.gather(found):
                self._kinds = {**kinds, **self._kinds}
        for position, rows in own.items():
            self._runner.check_kinds(rows, batches[position], self._kinds[batches[position].shape.dataset])

    def _exchange(self, batches: list[BatchRef], own: dict[int, Rows]) -> dict[int, Rows]:
        """Return the rows of all batches by position; one all-gather of bytes carries all names of all datasets."""
        world_size = self._processes.world_size
        if world_size == 1:
            # As they arrive from other ranks: kernels may round by the order in memory.
            return {position: {name: row.contiguous() for name, row in rows.items()} for position, rows in own.items()}
        placed = list(enumerate(batches))
        by_rank = [
            [given for given in assign_shares(placed, rank, world_size) if self.covers(given.ref)]
            for rank in range(world_size)
        ]
        sizes = [sum(self._num_bytes(given.ref) for given in share) for share in by_rank]
        # Ranks with fewer rows send some bytes without a meaning: an all-gather takes as much from each rank.
        sent = torch.empty(max(sizes), dtype=torch.uint8, device=self._processes.device)
        parts = [
            own[given.position][kind.name].contiguous().view(-1).view(torch.uint8)
            for given in by_rank[self._processes.rank]
            for kind in self._kinds[given.ref.shape.dataset]
        ]
        if parts:
            sent[: sizes[self._processes.rank]] = torch.cat(parts)
        received = self._processes.all_gather(sent)
        rows: dict[int, Rows] = {}
        for share, of_rank in zip(by_rank, received, strict=True):
            start = 0
            for given in share:
                rows[given.position] = {}
                for kind in self._kinds[given.ref.shape.dataset]:
                    stop = start + given.ref.num_items * kind.num_bytes
                    # A copy begins where a tensor of any type may begin.
                    values = of_rank[start:stop].clone().view(kind.dtype)
                    rows[given.position][kind.name] = values.view(given.ref.num_items, *kind.shape)
                    start = stop
        return rows

    def _num_bytes(self, ref: BatchRef) -> int:
        return ref.num_items * row_bytes(self._kinds[ref.shape.dataset])

    def _compute_loss(
        self, coupled: _CoupledRows, ref: BatchRef, key: Key, scales: Mapping[str, float], *, is_owner: bool
    ) -> None:
        """Compute the loss over all rows of a dataset, and the gradient of the step's loss at each of them.

        The weights that ``loss`` uses get their gradient from the step's first batch, and so once.
        """
        leaves = {name: row.requires_grad_() for name, row in coupled.rows.items() if row.is_floating_point()}
        losses = self._runner.loss(coupled.rows, ref, key)
        coupled.losses = {name: values.detach().view(-1) for name, values in losses.items()}
        # As far as fp16 needs it: the backward pass of loss runs in the precision of its forward pass.
        unit = self._engine.scaler.scale(self._one) if self._engine.scaler.is_enabled() else None
        roots, gradients = [], []
        for name, values in losses.items():
            if name in scales and values.requires_grad:
                roots.append(values)
                gradient = torch.full_like(values, scales[name])
                gradients.append(gradient if unit is None else gradient * unit)
        if roots:
            weights = self._trained_weights() if is_owner else []
            inputs = [*leaves.values(), *weights]
            found = torch.autograd.grad(roots, inputs, gradients, allow_unused=True)
            # The engine multiplies by the unit again: it is a power of two, so that nothing is lost.
            found = tuple(gradient if gradient is None or unit is None else gradient / unit for gradient in found)
            of_rows, of_weights = found[: len(leaves)], found[len(leaves) :]
            coupled.row_gradients = {
                name: gradient for name, gradient in zip(leaves, of_rows, strict=True) if gradient is not None
            }
            coupled.weight_gradients = [
                (weight, gradient) for weight, gradient in zip(weights, of_weights, strict=True) if gradient is not None
            ]
        coupled.rows = {name: row.detach() for name, row in coupled.rows.items()}

    def _trained_weights(self) -> list[nn.Parameter]:
        modules = self._experiment.components.trained_modules.values()
        # Modules may share a weight.
        weights = dict.fromkeys(weight for module in modules for weight in module.parameters())
        return [weight for weight in weights if weight.requires_grad]

    def losses(self, assignment: BatchAssignment) -> dict[str, torch.Tensor]:
        """Return what the loss over the step gave for the rows of one batch."""
        coupled = self._coupled[assignment.ref.shape.dataset]
        own = coupled.slices[assignment.position]
        return {name: values[own] for name, values in coupled.losses.items()}

    def roots(self, loaded: LoadedBatch, assignment: BatchAssignment, key: Key) -> dict[str, torch.Tensor]:
        """Embed a batch again; a backward pass from the returned scalars gives its weights their gradients.

        Each is the product of a tensor, by whose name it goes, and the gradient of the step's loss at it.
        """
        dataset = assignment.ref.shape.dataset
        coupled = self._coupled[dataset]
        rows = self._runner.embed(loaded, assignment.ref, key)
        self._runner.check_kinds(rows, assignment.ref, self._kinds[dataset])
        own = coupled.slices[assignment.position]
        roots = {f"rows {name}": (rows[name] * gradient[own]).sum() for name, gradient in coupled.row_gradients.items()}
        for number, (weight, gradient) in enumerate(coupled.weight_gradients if own.start == 0 else ()):
            roots[f"weight {number}"] = (weight * gradient).sum()
        return roots

    def find_not_finite(self, dataset: str) -> int | None:
        """Return the position of the first batch in the step with a row that is not finite, if there is one."""
        coupled = self._coupled[dataset]
        for position, own in coupled.slices.items():
            if not all(bool(row[own].isfinite().all()) for row in coupled.rows.values()):
                return position
        return None


@contextmanager
def _loss_explained(dataset: str, num_rows: int) -> Iterator[None]:
    """Turn a lack of memory in the loss over all rows into one sentence."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, PipelineError) or not is_out_of_memory(error):
            raise
        raise PipelineError(
            f"Out of memory in loss of module_transforms/{dataset}.py over the {num_rows} rows of a step.\n"
            "  fix: lower step_min_items in settings/data_loading.json: a smaller batch_size does not change the rows."
        ) from error


def _slices(batches: list[BatchRef], positions: Sequence[int]) -> dict[int, slice]:
    """Return which rows of a dataset each of its batches has, in plan order."""
    slices = {}
    start = 0
    for position in positions:
        stop = start + batches[position].num_items
        slices[position] = slice(start, stop)
        start = stop
    return slices
