"""What the datasets of an experiment look like, so that a change between two starts is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from pipeline.arguments import verb_line
from pipeline.distributed.processes import Processes
from pipeline.errors import InvalidExperiment, PipelineError, Problem
from pipeline.experiment.assembly import Experiment
from pipeline.paths import ExperimentPaths
from pipeline.serialization.fingerprint import fingerprint
from pipeline.system.seeding import seed_generators

Fingerprints = dict[str, dict[str, Any]]


def fingerprint_datasets(experiment: Experiment) -> Fingerprints:
    """Return, by dataset, its length, the points of its splits in order, and the content of as many as asked for."""
    return {name: _describe(experiment, name, dataset) for name, dataset in experiment.components.datasets.items()}


def fingerprint_everywhere(experiment: Experiment, processes: Processes) -> Fingerprints:
    """Return what rank zero sees, once all processes see the same."""
    found = processes.gather(processes.on_all_ranks(lambda: fingerprint_datasets(experiment)))
    for rank, other in enumerate(found):
        changed = list(_changed_datasets(found[0], other))
        if changed:
            where = str(experiment.folder / "datasets")
            what = f"must be the same on every process, but on rank {rank} {'; '.join(changed)}"
            raise InvalidExperiment([Problem(where, what, "sort what comes from a set or a folder")]).shared()
    return found[0]


def refuse_changed_datasets(paths: ExperimentPaths, before: Fingerprints, now: Fingerprints) -> None:
    """Refuse to continue with other data than an experiment began with; results of older versions do not know."""
    changed = list(_changed_datasets(before, now)) if before else []
    if changed:
        listed = "\n  ".join(changed)
        raise PipelineError(
            f"The data of {paths.name!r} must be what it was when the experiment began, but differs:\n  {listed}\n"
            "  fix: restore the data. If it was not changed, its order comes from something unordered, such as a set "
            "or a folder.\n  To train on, load its weights with load_weights_from_exp in a variant:\n"
            f"    {verb_line('new', 'VARIANT', paths.home, '--from', paths.name)}"
        )


def fingerprint_splits(experiment: Experiment) -> Fingerprints:
    """Return, by dataset, its length and the points of those splits that were read, in order."""
    return {name: _describe_splits(experiment, name, one) for name, one in experiment.components.datasets.items()}


def changed_splits(before: Fingerprints, now: Fingerprints) -> list[str]:
    """Return what has changed since an experiment began, as far as both know of it, one sentence each."""
    known = {name: {part: one[part] for part in one if part in now.get(name, {})} for name, one in before.items()}
    seen = {name: {part: one[part] for part in one if part in before.get(name, {})} for name, one in now.items()}
    return list(_changed_datasets(known, seen)) if before else []


def _describe(experiment: Experiment, name: str, dataset: Any) -> dict[str, Any]:
    described = _describe_splits(experiment, name, dataset)
    limit = experiment.settings.fingerprint_points
    if limit:
        contents = [_content(experiment, name, dataset, indices, limit) for indices in experiment.splits[name].values()]
        described["content"] = fingerprint(contents)
    return described


def _describe_splits(experiment: Experiment, name: str, dataset: Any) -> dict[str, Any]:
    described: dict[str, Any] = {"length": len(dataset) if hasattr(type(dataset), "__len__") else None}
    for split, indices in experiment.splits[name].items():
        described[split] = {"points": len(indices), "order": fingerprint(indices)}
    return described


def _content(experiment: Experiment, name: str, dataset: Any, indices: np.ndarray, limit: int) -> list[str]:
    """Return the fingerprints of points evenly spread over a split."""
    chosen = indices[np.unique(np.linspace(0, len(indices) - 1, min(limit, len(indices))).astype(int))]
    found = []
    for index in chosen.tolist():
        seed_generators(experiment.settings.training.seed, "fingerprint", name, index)
        found.append(fingerprint(dataset[index]))
    return found


def _changed_datasets(before: Fingerprints, now: Fingerprints) -> Iterator[str]:
    """Yield what differs, one sentence each."""
    for name in sorted({*before, *now}):
        if name not in before or name not in now:
            yield f"datasets/{name}.py: is {'new' if name not in before else 'gone'}"
            continue
        yield from (f"datasets/{name}.py: {what}" for what in _changes(before[name], now[name]))


def _changes(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    if before["length"] != now["length"]:
        yield f"has length {now['length']} instead of {before['length']}"
    for split in [one for one in ("train", "val") if one in before]:
        if before[split]["points"] != now[split]["points"]:
            yield f"the {split} split has {now[split]['points']} points instead of {before[split]['points']}"
        elif before[split]["order"] != now[split]["order"]:
            yield f"the {split} split has as many points as before, but other ones or in another order"
    if before.get("content") != now.get("content"):
        yield "the content of its points has changed"
