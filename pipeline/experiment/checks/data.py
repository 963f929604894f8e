"""Splits of the datasets, and whether what is trained and evaluated on them can work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from pipeline.errors import InvalidExperiment, Problem
from pipeline.experiment.pymodules.definitions import Components
from pipeline.experiment.pymodules.user_code import user_problem
from pipeline.experiment.settings.settings import Settings

# The indices of points, by dataset and split.
Splits = dict[str, dict[str, np.ndarray]]


def read_splits(
    components: Components, folder: Path, wanted: Sequence[str] = ("train", "val")
) -> tuple[Splits, list[Problem]]:
    """Return the indices of the wanted splits of every dataset, and what is wrong with them."""
    splits: Splits = {}
    problems: list[Problem] = []
    for name, dataset in components.datasets.items():
        where = str(folder / "datasets" / f"{name}.py")
        try:
            splits[name] = {split: _check_indices(split, dataset.get_split_idxs(split)) for split in wanted}
        # sys.exit in an author's code must not end the run as if it were done.
        except (Exception, SystemExit) as error:
            must = "get_split_idxs must return the indices of a split"
            problems.append(user_problem(error, folder, where, must))
            continue
        if "train" in wanted and not len(splits[name]["train"]):
            problems.append(Problem(where, "the train split must have points, but get_split_idxs('train') has 0"))
    return splits, problems


def _check_indices(split: str, returned: Sequence[int]) -> np.ndarray:
    """Return what an author's function returned as an array, or raise what is wrong with it."""
    indices = np.asarray(returned)
    # An empty list becomes an array of floats.
    if indices.ndim != 1 or (indices.size and not np.issubdtype(indices.dtype, np.integer)):
        what = f"{split!r} must be a list of integers, but has shape {indices.shape} of {indices.dtype}"
        is_mask = indices.ndim == 1 and indices.dtype == bool
        raise TypeError(what + ("; np.flatnonzero turns this mask into indices" if is_mask else ""))
    num_repeated = len(indices) - len(np.unique(indices))
    if num_repeated:
        raise ValueError(f"{split!r} must name each point once, but has {num_repeated} twice")
    return indices.astype(np.int64)


def unevaluated_registers(
    components: Components, settings: Settings, splits: Splits, folder: Path
) -> Iterator[Problem]:
    """Yield registers that no validation point would ever reach."""
    if settings.training.evaluation_interval == 0:
        return
    for register in settings.register_names:
        feeding = [
            dataset
            for dataset, definition in components.module_transforms.items()
            # A file that is not named like a dataset is reported with the names.
            if register in definition.loss_registers and dataset in splits
        ]
        # A register that no transform feeds is reported with the names.
        if feeding and not any(len(splits[dataset]["val"]) for dataset in feeding):
            what = f"register {register!r} is fed by {', '.join(feeding)}, whose val splits have 0 points"
            yield Problem(
                str(folder / "datasets"), what, "give one a val split, or set training.evaluation_interval to 0"
            )


def check_even_steps(steps: Iterable[Iterable[str]], world_size: int) -> None:
    """Refuse sync_batchnorm if some step has batches that cannot be shared out evenly.

    ``steps`` names, for each step of an epoch, the dataset of each of its batches. SyncBatchNorm waits for all ranks
    in every batch, so all must run a batch of the same dataset at the same time.
    """
    for number, datasets in enumerate(steps, 1):
        for dataset, num_batches in Counter(datasets).items():
            if num_batches % world_size:
                what = (
                    f"needs steps in which the number of each dataset's batches is a multiple of the "
                    f"{world_size} processes, but step {number} has {num_batches} of dataset {dataset!r}"
                )
                fix = "set it to false, or choose step_min_items, batch sizes and splits that divide evenly"
                # Every rank has the same plan and raises this, so that rank 0 alone reports it.
                raise InvalidExperiment([Problem("settings/training.json (sync_batchnorm)", what, fix)]).shared()
