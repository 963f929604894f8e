"""Predictions: what module transforms say of each item of an evaluation, put into the order of the split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from pipeline.distributed.processes import Processes
from pipeline.errors import PipelineError
from pipeline.serialization.npz_files import is_entry_name
from pipeline.training.batch_runner import BatchRunner
from pipeline.training.step_plan import BatchAssignment, PlannedBatch

Columns = dict[str, np.ndarray]
# Columns of ours: which point an item belongs to, and which item of the split it is.
INDEX = "index"
POSITION = "position"
_NUMBERS = "biufc"
_NUMPY_KNOWS = (torch.float16, torch.float32, torch.float64)


class Predictions:
    """Keeps what is predicted for the batches of this rank."""

    def __init__(self, runner: BatchRunner, datasets: Iterable[str]) -> None:
        self._runner = runner
        self._datasets = frozenset(datasets)
        self._batches: list[tuple[str, Columns]] = []

    def observe(self, assignment: BatchAssignment, planned: PlannedBatch, batch: Any) -> None:
        """Let the module transform predict for one batch, if its dataset has predictions; those of a stand-in go."""
        ref = assignment.ref
        dataset = ref.shape.dataset
        size = ref.shape.point_size
        if dataset in self._datasets:
            found = self._runner.predictions(batch, ref, (*planned.key, "predict"))
            if assignment.is_stand_in:
                return
            columns = checked_predictions(found, ref.num_items, f"module_transforms/{dataset}.py")
            first = ref.number * ref.shape.batch_size * size
            columns[INDEX] = np.repeat(np.asarray(planned.indices, dtype=np.int64), size)
            columns[POSITION] = np.arange(first, first + ref.num_items)
            self._batches.append((dataset, columns))

    def gather(self, processes: Processes) -> list[tuple[str, Columns]]:
        """Return the batches of all ranks on rank zero, and nothing on the others."""
        return [batch for batches in processes.gather_on_rank_zero(self._batches) for batch in batches]


def checked_predictions(found: Any, num_items: int, where: str) -> Columns:
    """Return predictions as arrays if they follow the contract: numbers by name, one entry per item."""
    if not isinstance(found, Mapping):
        raise PipelineError(f"predict in {where} must return a dict of tensors, but returned {type(found).__name__}.")
    columns = {}
    for name, value in found.items():
        if not isinstance(name, str) or "/" in name or not is_entry_name(name) or name in (INDEX, POSITION):
            raise PipelineError(
                f"predict in {where} must name predictions by plain words other than {INDEX} and {POSITION}, "
                f"but has {name!r}."
            )
        column = _as_array(value)
        if column.dtype.kind not in _NUMBERS or not column.shape or len(column) != num_items:
            raise PipelineError(
                f"predict in {where} must return numbers for {name!r} with one entry per item, here {num_items}, "
                f"but returned {column.dtype} of shape {column.shape}."
            )
        columns[name] = column
    return columns


def _as_array(value: Any) -> np.ndarray:
    if not isinstance(value, torch.Tensor):
        # What the transform may change later must not change here.
        return np.array(value)
    value = value.detach().cpu()
    is_odd = value.is_floating_point() and value.dtype not in _NUMPY_KNOWS
    return np.array((value.float() if is_odd else value).numpy())


def join_predictions(parts: Iterable[tuple[str, Columns]]) -> dict[str, Columns]:
    """Put batches or shards together by dataset, in the order of the split."""
    found: dict[str, list[Columns]] = {}
    for dataset, columns in parts:
        found.setdefault(dataset, []).append(columns)
    return {dataset: _in_order(dataset, found[dataset]) for dataset in sorted(found)}


def _in_order(dataset: str, parts: list[Columns]) -> Columns:
    kinds = {tuple((name, str(one.dtype), one.shape[1:]) for name, one in sorted(part.items())) for part in parts}
    if len(kinds) > 1:
        odd = sorted(set(min(kinds)) ^ set(max(kinds)))
        raise PipelineError(
            f"predict in module_transforms/{dataset}.py must return the same names, types and shapes for every batch, "
            f"but they differ: {odd}."
        )
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.argsort(joined[POSITION], kind="stable")
    return {name: column[order] for name, column in joined.items()}
