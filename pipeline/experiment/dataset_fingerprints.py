"""What the datasets of an experiment look like, so that a change between two starts is noticed."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import numpy as np

from pipeline.command_lines import verb_line
from pipeline.distributed.processes import Processes
from pipeline.errors import InvalidExperiment, PipelineError, Problem
from pipeline.experiment.assembly import Experiment
from pipeline.experiment.settings.json_source import Json
from pipeline.paths import ExperimentPaths
from pipeline.serialization.fingerprint import fingerprint
from pipeline.system.seeding import seed_generators

# As JSON, because manifests keep it: "length", each split with "points" and "order", and, if asked for, "content".
Fingerprint = dict[str, Json]
Fingerprints = dict[str, Fingerprint]


def fingerprint_datasets(experiment: Experiment) -> Fingerprints:
    """Return, by dataset, its length, the points of its splits in order, and the content of as many as asked for."""
    fingerprints = fingerprint_splits(experiment)
    settings = experiment.settings
    if settings.fingerprint_points == 0:
        return fingerprints
    for name, dataset in experiment.components.datasets.items():
        contents = []
        for indices in experiment.splits[name].values():
            # Points evenly spread over the split: a change somewhere in a large dataset is likely to touch one.
            num_points = min(settings.fingerprint_points, len(indices))
            positions = np.unique(np.linspace(0, len(indices) - 1, num_points).astype(int))
            points = []
            for index in indices[positions].tolist():
                # A dataset may draw when it loads a point, such as a random crop.
                seed_generators(settings.training.seed, "fingerprint", name, index)
                points.append(fingerprint(dataset[index]))
            contents.append(points)
        fingerprints[name]["content"] = fingerprint(contents)
    return fingerprints


def fingerprint_splits(experiment: Experiment) -> Fingerprints:
    """Return, by dataset, its length and the points of those splits that were read, in order."""
    fingerprints: Fingerprints = {}
    for name, dataset in experiment.components.datasets.items():
        # Only get_split_idxs is part of the contract; a dataset need not have a length.
        length = len(dataset) if isinstance(dataset, Sized) else None
        fingerprints[name] = {"length": length}
        for split, indices in experiment.splits[name].items():
            fingerprints[name][split] = {"points": len(indices), "order": fingerprint(indices)}
    return fingerprints


def fingerprint_everywhere(experiment: Experiment, processes: Processes) -> Fingerprints:
    """Return the fingerprints of rank zero, once all processes have the same."""
    # Every rank loads its own copy of the data: another order on one rank would train some points twice, others never.
    gathered = processes.gather(processes.on_all_ranks(fingerprint_datasets, experiment))
    for rank, fingerprints in enumerate(gathered):
        changes = list(_changes(gathered[0], fingerprints))
        if changes:
            where = str(experiment.folder / "datasets")
            what = f"must be the same on every process, but on rank {rank} {'; '.join(changes)}"
            raise InvalidExperiment([Problem(where, what, "sort what comes from a set or a folder")]).shared()
    return gathered[0]


def refuse_changed_datasets(paths: ExperimentPaths, before: Fingerprints, now: Fingerprints) -> None:
    """Refuse to continue with other data than an experiment began with."""
    # Results of the first format have no fingerprints, so there is nothing to compare.
    changes = list(_changes(before, now)) if before else []
    if changes:
        listed = "\n  ".join(changes)
        raise PipelineError(
            f"The data of {paths.name!r} must be what it was when the experiment began, but differs:\n  {listed}\n"
            "  fix: restore the data. If it was not changed, its order comes from something unordered, such as a set "
            "or a folder.\n  To train on, load its weights with load_weights_from_exp in a variant:\n"
            f"    {verb_line('new', 'VARIANT', paths.home, '--from', paths.name)}"
        )


def changed_splits(before: Fingerprints, now: Fingerprints) -> list[str]:
    """Return what has changed since an experiment began, as far as both sides know of it, one sentence each."""
    if not before:
        return []
    # An evaluation reads one split and no contents.
    return list(_changes(_restrict(before, now), _restrict(now, before)))


def _restrict(fingerprints: Fingerprints, others: Fingerprints) -> Fingerprints:
    """Return of each dataset the entries that it has on the other side as well."""
    return {
        name: {key: value for key, value in entries.items() if key in others.get(name, {})}
        for name, entries in fingerprints.items()
    }


def _changes(before: Fingerprints, now: Fingerprints) -> Iterator[str]:
    """Yield what differs, one sentence each."""
    for name in sorted({*before, *now}):
        where = f"datasets/{name}.py"
        if name not in before or name not in now:
            yield f"{where}: is {'new' if name not in before else 'gone'}"
            continue
        old = before[name]
        new = now[name]
        if old["length"] != new["length"]:
            yield f"{where}: has length {new['length']} instead of {old['length']}"
        for split in ("train", "val"):
            if split not in old:
                continue
            if old[split]["points"] != new[split]["points"]:
                yield f"{where}: the {split} split has {new[split]['points']} points instead of {old[split]['points']}"
            elif old[split]["order"] != new[split]["order"]:
                yield f"{where}: the {split} split has as many points as before, but other ones or in another order"
        if old.get("content") != new.get("content"):
            yield f"{where}: the content of its points has changed"
