"""What the datasets of an experiment look like, so that a change between two starts is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from pipeline.experiment.assembly import Experiment
from pipeline.runtime.fingerprint import fingerprint
from pipeline.runtime.randomness import key_generators

Fingerprints = dict[str, dict[str, Any]]


def fingerprint_datasets(experiment: Experiment) -> Fingerprints:
    """Return, by dataset, its length, the points of its splits in order, and the content of as many as asked for."""
    return {name: _describe(experiment, name, dataset) for name, dataset in experiment.components.datasets.items()}


def _describe(experiment: Experiment, name: str, dataset: Any) -> dict[str, Any]:
    splits = experiment.splits[name]
    described: dict[str, Any] = {"length": len(dataset) if hasattr(type(dataset), "__len__") else None}
    for split, indices in splits.items():
        described[split] = {"points": len(indices), "order": fingerprint(indices)}
    limit = experiment.settings.fingerprint_points
    if limit:
        contents = [_content(experiment, name, dataset, indices, limit) for indices in splits.values()]
        described["content"] = fingerprint(contents)
    return described


def _content(experiment: Experiment, name: str, dataset: Any, indices: np.ndarray, limit: int) -> list[str]:
    """Return the fingerprints of points evenly spread over a split."""
    chosen = indices[np.unique(np.linspace(0, len(indices) - 1, min(limit, len(indices))).astype(int))]
    found = []
    for index in chosen.tolist():
        key_generators(experiment.settings.training.seed, "fingerprint", name, index)
        found.append(fingerprint(dataset[index]))
    return found


def changed_datasets(before: Fingerprints, now: Fingerprints) -> Iterator[str]:
    """Yield what differs, one sentence each."""
    for name in sorted({*before, *now}):
        if name not in before or name not in now:
            yield f"datasets/{name}.py: is {'new' if name not in before else 'gone'}"
            continue
        yield from (f"datasets/{name}.py: {what}" for what in _changes(before[name], now[name]))


def _changes(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    if before["length"] != now["length"]:
        yield f"has length {now['length']} instead of {before['length']}"
    for split in ("train", "val"):
        if before[split]["points"] != now[split]["points"]:
            yield f"the {split} split has {now[split]['points']} points instead of {before[split]['points']}"
        elif before[split]["order"] != now[split]["order"]:
            yield f"the {split} split has as many points as before, but other ones or in another order"
    if before.get("content") != now.get("content"):
        yield "the content of its points has changed"
