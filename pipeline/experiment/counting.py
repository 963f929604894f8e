"""Counting: every counter sees the metadata of every training point of its datasets, once."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.errors import PipelineError
from pipeline.experiment.assembly import Experiment
from pipeline.experiment.pymodules.user_code import user_problem


def count(experiment: Experiment) -> Iterator[None]:
    """Count point by point, so that the caller can answer other ranks in between."""
    for name, entry in experiment.components.data_counters.items():
        for dataset_name in entry.dataset_names:
            dataset = experiment.components.datasets[dataset_name]
            for index in experiment.splits[dataset_name]["train"].tolist():
                try:
                    entry.counter.count(dataset_name, dataset.getitem_metadata(index))
                except Exception as error:
                    where = str(experiment.folder / "data_counters" / f"{name}.py")
                    must = f"counting point {index} of {dataset_name} must work"
                    raise PipelineError(str(user_problem(error, experiment.folder, where, must))) from error
                yield
