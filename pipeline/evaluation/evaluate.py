"""An evaluation on these processes, from the frozen copy and committed weights alone; nothing is written."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.checkpoint.parts import restore_counters
from pipeline.checkpoint.shards import targets_in
from pipeline.distributed.processes import Processes
from pipeline.errors import InvalidExperiment, PipelineError, Problem, UsageError
from pipeline.evaluation.result import Outcome
from pipeline.experiment.assembly import Experiment, assemble_for_evaluation
from pipeline.experiment.checks import read_splits
from pipeline.experiment.dataset_fingerprints import Fingerprints, changed_splits, fingerprint_splits
from pipeline.experiment.pymodules.contracts import takes
from pipeline.experiment.settings.settings import parse_settings, read_contents
from pipeline.experiment.sharding import mesh_of
from pipeline.lifecycle.frozen_copy import digest_folder, refuse_edited_copy
from pipeline.lifecycle.mode import check_results_exist
from pipeline.paths import ExperimentPaths
from pipeline.serialization.fingerprint import fingerprint
from pipeline.session import create_module_transforms
from pipeline.store.manifest import Entry, Manifest
from pipeline.store.weight_pools import (
    FROZEN,
    HeldFiles,
    ModuleFiles,
    counter_entries,
    epoch_of,
    open_commit_on_all_ranks,
    pool_entries,
    steps_of,
)
from pipeline.system.logging import LOGGER
from pipeline.system.seeding import set_deterministic
from pipeline.tracking.progress_bar import ProgressBar
from pipeline.training.batch_runner import BatchRunner
from pipeline.training.evaluation import EvaluationPass
from pipeline.training.predictions import Columns, Predictions

SPLITS = ("train", "val", "test")
Facts = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """What is to be evaluated."""

    pool: str
    split: str
    shard: tuple[int, int]
    predicts: bool
    accepts_edited_copy: bool


def evaluate(
    paths: ExperimentPaths, processes: Processes, request: Request
) -> tuple[Outcome, list[tuple[str, Columns]]]:
    """Return the outcome on every rank, and on rank zero the predictions of all batches."""
    experiment, facts = _restored(paths, processes, request)
    transforms = create_module_transforms(experiment, processes.device)
    predicting = processes.on_all_ranks(lambda: _predicting(experiment, transforms)) if request.predicts else []
    with closing(BatchRunner(experiment, processes, request.split, transforms, evaluates=True)) as runner:
        evaluation = EvaluationPass(experiment, processes, runner, request.shard)
        predictions = Predictions(runner, predicting)
        logging = experiment.settings.logging
        shows = logging.progress_bar and processes.is_rank_zero
        with ProgressBar(request.split, evaluation.num_rounds, 0, logging.eval_updates, enabled=shows) as bar:
            for _ in evaluation.rounds(facts["epoch"] or 0, predictions.observe):
                bar.advance()
    index, count = request.shard
    sums = evaluation.collect()[0][index::count]
    facts |= {
        "batches": len(evaluation.refs),
        "items": evaluation.num_items(),
        "predicted": {
            one.dataset: one.num_points * one.point_size for one in runner.shapes if one.dataset in predicting
        },
    }
    return Outcome(facts, request.shard, processes.world_size, sums), predictions.gather(processes)


def _restored(paths: ExperimentPaths, processes: Processes, request: Request) -> tuple[Experiment, Facts]:
    """Return the experiment with the weights of a pool, and what identifies it."""

    def needed(manifest: Manifest) -> list[Entry]:
        weights = _weights(paths, manifest, request.pool).values()
        return [*(entry for files in weights for entry in files.values()), *counter_entries(manifest).values()]

    processes.on_rank_zero(lambda: check_results_exist(paths))
    with open_commit_on_all_ranks(paths, processes, needed) as (manifest, held):
        processes.on_rank_zero(lambda: _check_copy(paths, manifest, request))
        experiment = _assemble(paths, processes, request)
        processes.on_rank_zero(lambda: _check_points(experiment, request.split))
        splits = _same_splits(experiment, processes)
        _warn_of_changes(paths, changed_splits(manifest.fingerprints, splits), processes)
        processes.on_all_ranks(lambda: _restore(experiment, _weights(paths, manifest, request.pool), held))
        processes.on_all_ranks(lambda: _restore_counters(experiment, manifest, held))
    return experiment, _facts(paths, manifest, request, splits)


def _weights(paths: ExperimentPaths, manifest: Manifest, pool: str) -> dict[str, ModuleFiles]:
    """Return the files of all modules: the pool's, and those of the frozen modules."""
    if pool == FROZEN:
        raise UsageError(f"--pool must name weights that were trained, but {FROZEN} has those of frozen modules only.")
    return {**pool_entries(paths, manifest, FROZEN), **pool_entries(paths, manifest, pool)}


def _check_copy(paths: ExperimentPaths, manifest: Manifest, request: Request) -> None:
    refuse_edited_copy(paths.results, manifest.copies, is_accepted=request.accepts_edited_copy)


def _assemble(paths: ExperimentPaths, processes: Processes, request: Request) -> Experiment:
    settings = processes.on_all_ranks(lambda: parse_settings(read_contents(paths.results / "settings")))
    if settings.training.uses_deterministic_kernels(processes.device.type):
        set_deterministic()
    mesh = mesh_of(processes, settings.training)
    folder = paths.results / "pymodules"
    device = processes.device
    return processes.on_all_ranks(lambda: assemble_for_evaluation(folder, settings, device, request.split, mesh))


def _check_points(experiment: Experiment, split: str) -> None:
    """Name datasets that have nothing to evaluate, and refuse if none has."""
    empty = [name for name, splits in experiment.splits.items() if not len(splits[split])]
    if len(empty) == len(experiment.splits):
        others = [other for other in SPLITS if other != split and _has_points(experiment, other)]
        listed = ", ".join(others) or "no split"
        raise UsageError(f"No dataset has points in the {split} split; there are points in {listed}.")
    for name in empty:
        LOGGER.warning("Dataset %s has no points in the %s split and is left out.", name, split)


def _has_points(experiment: Experiment, split: str) -> bool:
    found, _ = read_splits(experiment.components, experiment.folder, [split])
    return any(len(splits[split]) for splits in found.values())


def _same_splits(experiment: Experiment, processes: Processes) -> Fingerprints:
    """Return what the split looks like, once all processes see the same."""
    found = processes.gather(fingerprint_splits(experiment))
    if any(one != found[0] for one in found):
        where = str(experiment.folder / "datasets")
        fix = "sort what comes from a set or a folder"
        what = "get_split_idxs must return the same points in the same order on every process, but does not"
        raise InvalidExperiment([Problem(where, what, fix)]).shared()
    return found[0]


def _warn_of_changes(paths: ExperimentPaths, changed: list[str], processes: Processes) -> None:
    for what in changed if processes.is_rank_zero else []:
        LOGGER.warning("The data is not what %s began with: %s.", paths.name, what)


def _restore(experiment: Experiment, weights: dict[str, ModuleFiles], held: HeldFiles) -> None:
    for name, module in experiment.components.all_modules.items():
        if name not in weights:
            raise PipelineError(f"Module {name!r} has no weights in this pool.")
        try:
            module.load_state_dict(held.state(weights[name], targets_in(module)))
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise PipelineError(f"The committed weights of {name!r} must fit the module, but: {reason}") from error


def _restore_counters(experiment: Experiment, manifest: Manifest, held: HeldFiles) -> None:
    """Let the counters load from a folder of their own, as some make it if it is missing."""
    with tempfile.TemporaryDirectory(prefix="counters_") as folder:
        for path, entry in counter_entries(manifest).items():
            held.copy(entry, Path(folder) / path)
        restore_counters(experiment.components, Path(folder))


def _facts(paths: ExperimentPaths, manifest: Manifest, request: Request, splits: Fingerprints) -> Facts:
    """Return what shards of one evaluation must agree on."""
    weights = _weights(paths, manifest, request.pool)
    pool = pool_entries(paths, manifest, request.pool)
    digests = {(name, file): one.digest.sha256 for name, files in weights.items() for file, one in files.items()}
    return {
        "experiment": paths.name,
        "split": request.split,
        "pool": request.pool,
        "epoch": epoch_of(manifest, request.pool),
        "steps": steps_of(manifest, request.pool),
        "commit": max(entry.generation for files in pool.values() for entry in files.values()),
        "weights": fingerprint(digests),
        "code": fingerprint(digest_folder(paths.results)),
        "datasets": splits,
    }


def _predicting(experiment: Experiment, transforms: dict[str, Any]) -> list[str]:
    """Return the datasets whose module transforms predict, or refuse a predict that cannot be called."""
    found: dict[str, Callable[..., Any]] = {
        name: one.predict for name, one in transforms.items() if callable(getattr(one, "predict", None))
    }
    odd = [name for name, predict in found.items() if not takes(predict, 2)]
    if odd:
        what = "predict must be callable as predict(batch, modules)"
        fix = "rename it, or evaluate with --no-predictions"
        raise InvalidExperiment(
            [Problem(str(experiment.folder / "module_transforms" / f"{name}.py"), what, fix) for name in odd]
        )
    return list(found)
