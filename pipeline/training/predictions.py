"""Predictions: what module transforms say of each item of an evaluation, put into the order of the split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from pipeline.distributed.processes import Processes
from pipeline.errors import PipelineError
from pipeline.serialization.npz_files import is_entry_name
from pipeline.training.batch_points import PlannedBatch
from pipeline.training.batch_runner import BatchRunner
from pipeline.training.loaders import Batch
from pipeline.training.step_plan import BatchAssignment

Columns = dict[str, np.ndarray]
# Columns of ours: which point an item belongs to, and which item of the split it is.
INDEX = "index"
POSITION = "position"
# The kinds of numpy types that are numbers, and the floats of torch that numpy has as well.
_NUMBERS = "biufc"
_NUMPY_FLOATS = (torch.float16, torch.float32, torch.float64)


class Predictions:
    """Keeps what is predicted for the batches of this rank."""

    def __init__(self, runner: BatchRunner, datasets: Iterable[str]) -> None:
        self._runner = runner
        self._datasets = frozenset(datasets)
        self._batches: list[tuple[str, Columns]] = []

    def observe(self, assignment: BatchAssignment, planned: PlannedBatch, batch: Batch) -> None:
        """Let the module transform predict for one batch, if its dataset has predictions."""
        ref = assignment.ref
        dataset = ref.shape.dataset
        size = ref.shape.point_size
        if dataset not in self._datasets:
            return
        predictions = self._runner.predictions(batch, ref, (*planned.key, "predict"))
        # A stand-in runs the modules with the other ranks; the batch itself is another rank's.
        if not assignment.is_stand_in:
            columns = check_predictions(predictions, ref.num_items, f"module_transforms/{dataset}.py")
            first = ref.number * ref.shape.batch_size * size
            columns[INDEX] = np.repeat(np.asarray(planned.indices, dtype=np.int64), size)
            columns[POSITION] = np.arange(first, first + ref.num_items)
            self._batches.append((dataset, columns))

    def gather(self, processes: Processes) -> list[tuple[str, Columns]]:
        """Return the batches of all ranks on rank zero, and nothing on the others."""
        return [batch for batches in processes.gather_on_rank_zero(self._batches) for batch in batches]


def check_predictions(predictions: object, num_items: int, where: str) -> Columns:
    """Return predictions as arrays if they follow the contract: numbers by name, one entry per item."""
    if not isinstance(predictions, Mapping):
        given = type(predictions).__name__
        raise PipelineError(f"predict in {where} must return a dict of tensors, but returned {given}.")
    columns = {}
    for name, value in predictions.items():
        if not isinstance(name, str) or "/" in name or not is_entry_name(name) or name in (INDEX, POSITION):
            raise PipelineError(
                f"predict in {where} must name predictions by plain words other than {INDEX} and {POSITION}, "
                f"but has {name!r}."
            )
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu()
            if value.is_floating_point() and value.dtype not in _NUMPY_FLOATS:
                value = value.float()
            value = value.numpy()
        # A copy: what the transform changes later must not change here.
        column = np.array(value)
        if column.dtype.kind not in _NUMBERS or not column.shape or len(column) != num_items:
            raise PipelineError(
                f"predict in {where} must return numbers for {name!r} with one entry per item, here {num_items}, "
                f"but returned {column.dtype} of shape {column.shape}."
            )
        columns[name] = column
    return columns


def join_predictions(parts: Iterable[tuple[str, Columns]]) -> dict[str, Columns]:
    """Put batches or shards together by dataset, in the order of the split."""
    by_dataset: dict[str, list[Columns]] = {}
    for dataset, columns in parts:
        by_dataset.setdefault(dataset, []).append(columns)
    joined = {}
    for dataset, batches in sorted(by_dataset.items()):
        kinds = {
            tuple((name, str(column.dtype), column.shape[1:]) for name, column in sorted(batch.items()))
            for batch in batches
        }
        if len(kinds) > 1:
            differing = sorted(set(min(kinds)) ^ set(max(kinds)))
            raise PipelineError(
                f"predict in module_transforms/{dataset}.py must return the same names, types and shapes for every "
                f"batch, but they differ: {differing}."
            )
        columns = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
        order = np.argsort(columns[POSITION], kind="stable")
        joined[dataset] = {name: column[order] for name, column in columns.items()}
    return joined
