"""Why a batch failed: what torch and Python say, in the words of the files that an author has written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn

from pipeline.errors import BrokenContract, Problem
from pipeline.experiment.assembly import Experiment
from pipeline.experiment.pymodules.user_code import place_of, user_problem
from pipeline.training.loaders import Batch

_MAX_NAMES = 10


def explain_failure(error: BaseException, experiment: Experiment, dataset: str, split: str, batch: Batch) -> Problem:
    """Return what a batch of a dataset met, with the likely remedy; ``batch`` is None if it could not be loaded."""
    file = experiment.folder / "module_transforms" / f"{dataset}.py"
    problem = user_problem(error, experiment.folder, str(file), f"a {split} batch of {dataset} must go through")
    if isinstance(error, BrokenContract):
        return problem
    if (bad_point := _find_bad_point(error, experiment, dataset, split)) is not None:
        return bad_point
    return replace(problem, fix=problem.fix or _find_remedy(error, experiment, dataset, batch))


def _find_bad_point(error: BaseException, experiment: Experiment, dataset: str, split: str) -> Problem | None:
    """Return what is wrong with the points of a dataset themselves, if that explains the failure."""
    file = experiment.folder / "datasets" / f"{dataset}.py"
    where = place_of(file, "__getitem__")
    try:
        point = experiment.components.datasets[dataset][int(experiment.splits[dataset][split][0])]
    except Exception:
        return None
    has_own_collate = experiment.components.dataloaders[dataset].collate_fn is not torch.utils.data.default_collate
    if isinstance(point, Mapping):
        empty = [str(name) for name, value in point.items() if value is None]
        if empty and not has_own_collate:
            what = f"every value of a point must be a number, an array or a tensor, but {', '.join(empty)} is None"
            return Problem(where, what, "leave it out, or write a collate_fn in dataloaders that accepts it")
        return None
    if has_own_collate or not isinstance(error, (TypeError, AttributeError, IndexError)):
        return None
    what = f'a point must be a dict, so that batch["name"] works, but __getitem__ returns a {type(point).__name__}'
    return Problem(where, what, 'return {"input": …, "target": …}')


def _find_remedy(error: BaseException, experiment: Experiment, dataset: str, batch: Batch) -> str:
    text = str(error)
    if "not compiled with CUDA" in text or ".cuda(" in text:
        return "leave devices to the pipeline: it moves modules and batches"
    tensors = dict(_tensors(batch)) if isinstance(batch, Mapping) else {}
    if isinstance(error, KeyError) and isinstance(batch, Mapping):
        names = ", ".join(map(str, list(batch)[:_MAX_NAMES]))
        return f"the batch has {names}; the modules are {', '.join(experiment.components.all_modules)}"
    if "must have the same dtype" in text or "expected scalar type" in text:
        doubles = [name for name, tensor in tensors.items() if tensor.dtype == torch.float64]
        if doubles:
            names = ", ".join(doubles)
            return f"{names} of the batch is float64, weights are float32: cast it in datasets/{dataset}.py"
    if "shapes cannot be multiplied" in text or "normalized_shape" in text:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        widths = ", ".join(_first_layers(experiment))
        return f"the batch has {shapes}; first layers: {widths}"
    return ""


def _tensors(batch: Mapping[str, object]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in list(batch.items())[:_MAX_NAMES]:
        if isinstance(value, torch.Tensor):
            yield str(name), value


def _first_layers(experiment: Experiment) -> Iterator[str]:
    """Yield the first layer of each module that has a number of inputs."""
    for name, module in experiment.components.all_modules.items():
        for layer in module.modules():
            if isinstance(layer, (nn.Linear, nn.LayerNorm)):
                yield f"{name} {layer}"
                break
