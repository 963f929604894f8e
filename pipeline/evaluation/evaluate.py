"""An evaluation on these processes, from the frozen copy and committed weights alone; nothing is written."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.checkpoint.parts import restore_counters
from pipeline.checkpoint.snapshots import target_in
from pipeline.components import Position
from pipeline.distributed.processes import Processes
from pipeline.errors import InvalidExperiment, PipelineError, Problem, UnreadableFile, UsageError, nearest
from pipeline.evaluation.result import BLOCKS, Facts, Outcome
from pipeline.experiment.assembly import Experiment, assemble_for_evaluation, read_metrics
from pipeline.experiment.checks.data import read_splits
from pipeline.experiment.constant_parameters import Record, check_rebuilt
from pipeline.experiment.dataset_fingerprints import Fingerprints, changed_splits, fingerprint_splits
from pipeline.experiment.initial_weights import rebuild_modules
from pipeline.experiment.pymodules.contracts import takes
from pipeline.experiment.settings.settings import Settings, parse_settings, read_contents
from pipeline.experiment.sharding import mesh_of
from pipeline.lifecycle.frozen_copy import digest_folder, refuse_edited_copy
from pipeline.lifecycle.mode import check_results_exist
from pipeline.paths import ExperimentPaths
from pipeline.serialization.fingerprint import fingerprint
from pipeline.serialization.torch_files import put_together
from pipeline.store.manifest import Entry, Manifest
from pipeline.store.weight_pools import (
    CONSTANT_RECORD,
    FROZEN,
    HeldFiles,
    ModuleFiles,
    all_steps_of,
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
from pipeline.training.metrics import MetricAccumulator, is_gathered
from pipeline.training.predictions import Columns, Predictions

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Request:
    """What is to be evaluated."""

    pool: str
    split: str
    shard: tuple[int, int]
    # The average that stands in for its source, besides those that always do.
    average: str | None
    predicts: bool
    accepts_edited_copy: bool


def evaluate(
    paths: ExperimentPaths, processes: Processes, request: Request
) -> tuple[Outcome, list[tuple[str, Columns]]]:
    """Return the outcome on every rank, and on rank zero the predictions of all batches."""
    experiment, manifest, splits = _restore_pool(paths, processes, request)
    if request.average is not None:
        _check_average(experiment, request.average)
    # Before the pass, which may take hours: the copy may be edited before it ends, and this is what was loaded.
    code = fingerprint(digest_folder(paths.results))
    epoch = epoch_of(manifest, request.pool)
    experiment.create_module_transforms()
    predicting: list[str] = []
    if request.predicts:
        predicting = processes.on_all_ranks(_find_predicting, experiment)
    with closing(BatchRunner(experiment, processes, request.split, evaluates=True)) as runner:
        runner.position = Position(epoch or 0, 0, all_steps_of(manifest, request.pool, experiment.max_steps))
        evaluation = EvaluationPass(experiment, processes, runner, request.shard, request.average)
        is_whole = request.shard == (0, 1)
        if not is_whole:
            _refuse_gathered_metrics(experiment)
        predictions = Predictions(runner, predicting)
        logging = experiment.settings.logging
        shows_bar = logging.progress_bar and processes.is_rank_zero
        with ProgressBar(request.split, evaluation.num_rounds, 0, logging.eval_updates, enabled=shows_bar) as bar:
            for _ in evaluation.rounds(epoch or 0, predictions.observe):
                bar.advance()
    own = evaluation.batches
    sums, items = (table[own.start : own.stop] for table in evaluation.collect())
    values = evaluation.metrics.collect() if is_whole else {}
    states = {} if is_whole else evaluation.metrics.gather()
    weights = _choose_weights(paths, manifest, request.pool)
    digests = {(name, file): entry.digest.sha256 for name, files in weights.items() for file, entry in files.items()}
    pool = pool_entries(paths, manifest, request.pool)
    facts: Facts = {
        "experiment": paths.name,
        "split": request.split,
        "pool": request.pool,
        "epoch": epoch,
        "steps": steps_of(manifest, request.pool),
        # Of the pool's weights, not of the manifest: a run may commit again between two shards of one evaluation.
        "commit": max(entry.generation for files in pool.values() for entry in files.values()),
        "weights": fingerprint(digests),
        "code": code,
        "datasets": splits,
        "layout": BLOCKS,
        "batches": len(evaluation.refs),
        "items": evaluation.planned_items(),
        "predicted": {
            shape.dataset: shape.num_points * shape.point_size for shape in runner.shapes if shape.dataset in predicting
        },
    }
    if request.average is not None:
        facts["average"] = request.average
    outcome = Outcome(facts, request.shard, processes.world_size, sums, items, values, states)
    return outcome, predictions.gather(processes)


def _check_average(experiment: Experiment, name: str) -> None:
    known = list(experiment.components.averages)
    if name not in known:
        listed = ", ".join(known) or "none"
        raise UsageError(f"No average {name!r}; there are {listed}.{nearest(name, known)}").shared()


def compute_metrics(paths: ExperimentPaths, outcome: Outcome) -> Outcome:
    """Return the outcome of a merge with the values of its metrics, which the experiment's own code computes."""
    if not outcome.states:
        return outcome
    if not paths.results.is_dir() or fingerprint(digest_folder(paths.results)) != outcome.facts["code"]:
        raise UsageError(
            f"The metrics of these shards need the code of {paths.name!r} as it was when they were evaluated, but "
            f"{paths.home} does not have it.",
            "merge them in the data home of the experiment: --data-home DIR",
        )
    folder = paths.results / "pymodules"
    metrics = read_metrics(folder, parse_settings(read_contents(paths.results / "settings")))
    if set(metrics) != set(outcome.states):
        raise UnreadableFile(f"The shards must hold the metrics {', '.join(metrics)}, but do not.")
    return replace(outcome, metrics=MetricAccumulator(metrics, folder, Processes()).compute(outcome.states))


def _refuse_gathered_metrics(experiment: Experiment) -> None:
    """Refuse metrics that must see all batches of a split themselves: a shard's file cannot hold them."""
    gathered = [name for name, entry in experiment.components.metrics.items() if is_gathered(entry.metric)]
    if gathered:
        raise UsageError(
            f"The metric {gathered[0]} must see the whole split, so it cannot be evaluated in shards.",
            "evaluate under torchrun instead, with as many processes as you like",
        )


def _restore_pool(
    paths: ExperimentPaths, processes: Processes, request: Request
) -> tuple[Experiment, Manifest, Fingerprints]:
    """Return the experiment with the weights of a pool, the commit they are of, and what the split looks like."""

    def choose_entries(manifest: Manifest) -> list[Entry]:
        """Return all files that are read: they must be open before a newer commit can remove them."""
        weights = _choose_weights(paths, manifest, request.pool).values()
        return [*(entry for files in weights for entry in files.values()), *counter_entries(manifest).values()]

    processes.on_rank_zero(check_results_exist, paths)
    with open_commit_on_all_ranks(paths, processes, choose_entries) as (manifest, held):
        is_accepted = request.accepts_edited_copy
        processes.on_rank_zero(refuse_edited_copy, paths.results, manifest.copies, is_accepted=is_accepted)
        experiment = _assemble(paths, processes, request.split)
        processes.on_rank_zero(_check_points, experiment, request.split)
        splits = processes.gather(fingerprint_splits(experiment))
        if any(other != splits[0] for other in splits):
            where = str(experiment.folder / "datasets")
            fix = "sort what comes from a set or a folder"
            what = "get_split_idxs must return the same points in the same order on every process, but does not"
            raise InvalidExperiment([Problem(where, what, fix)]).shared()
        # A warning, not a refusal: to evaluate on other data than the run had may be what is wanted.
        for change in changed_splits(manifest.fingerprints, splits[0]) if processes.is_rank_zero else []:
            LOGGER.warning("The data is not what %s began with: %s.", paths.name, change)
        weights = _choose_weights(paths, manifest, request.pool)
        processes.on_all_ranks(_load, paths, experiment, weights, counter_entries(manifest), held)
    return experiment, manifest, splits[0]


def _choose_weights(paths: ExperimentPaths, manifest: Manifest, pool: str) -> dict[str, ModuleFiles]:
    """Return the files of all modules: the pool's, and those of the frozen modules."""
    if pool == FROZEN:
        raise UsageError(f"--pool must name weights that were trained, but {FROZEN} has those of frozen modules only.")
    return {**pool_entries(paths, manifest, FROZEN), **pool_entries(paths, manifest, pool)}


def _assemble(paths: ExperimentPaths, processes: Processes, split: str) -> Experiment:

    def read_settings() -> Settings:
        return parse_settings(read_contents(paths.results / "settings"))

    settings = processes.on_all_ranks(read_settings)
    # As in training, so that the values have the bits that the run recorded.
    if settings.training.uses_deterministic_kernels(processes.device.type):
        set_deterministic()
    mesh = mesh_of(processes, settings.training)
    folder = paths.results / "pymodules"
    return processes.on_all_ranks(assemble_for_evaluation, folder, settings, processes.device, split, mesh)


def _check_points(experiment: Experiment, split: str) -> None:
    """Name datasets that have nothing to evaluate, and refuse if none has."""
    empty = [name for name, splits in experiment.splits.items() if not len(splits[split])]
    if len(empty) == len(experiment.splits):
        others = []
        # The splits that were not asked for have not been read so far.
        for other in (name for name in SPLITS if name != split):
            points, _ = read_splits(experiment.components, experiment.folder, [other])
            if any(len(splits[other]) for splits in points.values()):
                others.append(other)
        listed = ", ".join(others) or "no split"
        raise UsageError(f"No dataset has points in the {split} split; there are points in {listed}.")
    for name in empty:
        LOGGER.warning("Dataset %s has no points in the %s split and is left out.", name, split)


def _load(
    paths: ExperimentPaths,
    experiment: Experiment,
    weights: dict[str, ModuleFiles],
    counters: dict[str, Entry],
    held: HeldFiles,
) -> None:
    """Load the weights of all modules, and the data counters."""
    rebuilt = [name for name, files in weights.items() if CONSTANT_RECORD in files]
    training = experiment.settings.training
    rebuild_modules(experiment.components.modules, rebuilt, paths, experiment.folder, training)
    for name, module in experiment.components.all_modules.items():
        if name not in weights:
            raise PipelineError(f"Module {name!r} has no weights in this pool.")
        try:
            state = held.state(weights[name], target_in(module))
            if CONSTANT_RECORD in weights[name]:
                record = Record.from_json(held.document(weights[name][CONSTANT_RECORD]))
                state = put_together(check_rebuilt(name, module, record, experiment.folder), state)
            module.load_state_dict(state)
        except RuntimeError as error:
            # torch's message has several lines, one for each kind of misfit.
            reason = " ".join(str(error).split())
            raise PipelineError(f"The committed weights of {name!r} must fit the module, but: {reason}") from error
    # From a temporary copy, because some counters create their folder if it is missing, and results are only read.
    with tempfile.TemporaryDirectory(prefix="counters_") as folder:
        for path, entry in counters.items():
            held.copy(entry, Path(folder) / path)
        restore_counters(experiment.components, Path(folder))


def _find_predicting(experiment: Experiment) -> list[str]:
    """Return the datasets whose module transforms predict, or refuse a predict that cannot be called."""
    methods: dict[str, Callable[..., object]] = {}
    for name, transform in experiment.module_transforms.items():
        predict = getattr(transform, "predict", None)
        if callable(predict):
            methods[name] = predict
    problems = [
        Problem(
            str(experiment.folder / "module_transforms" / f"{name}.py"),
            "predict must be callable as predict(batch, modules)",
            "rename it, or evaluate with --no-predictions",
        )
        for name, predict in methods.items()
        if not takes(predict, 2)
    ]
    if problems:
        raise InvalidExperiment(problems)
    return list(methods)
