"""What an assembled experiment needs to run on these processes, put together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pipeline.checkpoint.parts import PersistedParts, RunValue
from pipeline.checkpoint.records import Records
from pipeline.distributed.processes import Processes
from pipeline.errors import InvalidExperiment, Problem
from pipeline.experiment.assembly import Experiment
from pipeline.monitoring.journal import Journal
from pipeline.monitoring.status_file import StatusFile
from pipeline.paths import ExperimentPaths
from pipeline.store.background_commit import Commits
from pipeline.store.store import ResultsStore
from pipeline.system.logging import LOGGER
from pipeline.system.seeding import seed_generators
from pipeline.system.stop_requests import StopRequests
from pipeline.training.batch_runner import BatchRunner
from pipeline.training.engines.base import GradientEngine
from pipeline.training.engines.ddp import DdpEngine
from pipeline.training.engines.exact import ExactEngine
from pipeline.training.engines.fsdp import FsdpEngine
from pipeline.training.evaluation import EvaluationStage
from pipeline.training.images import Pictures
from pipeline.training.rank_comparison import RankComparison
from pipeline.training.step_plan import StepPlan
from pipeline.training.training import TrainingStage

_NUM_SKIPPED = "num_consecutive_skipped"
_ENGINES: dict[str, Callable[[Experiment, Processes], GradientEngine]] = {"fast": DdpEngine, "exact": ExactEngine}


@dataclass
class TrainingSession:
    """The parts a loop drives; rank zero alone has a store, a status file and trackers that do anything."""

    paths: ExperimentPaths
    processes: Processes
    experiment: Experiment
    records: Records
    parts: PersistedParts
    module_transforms: dict[str, Any]
    engine: GradientEngine
    ranks: RankComparison
    runners: tuple[BatchRunner, BatchRunner]
    training: TrainingStage
    evaluation: EvaluationStage
    pictures: Pictures
    store: ResultsStore
    commits: Commits
    status: StatusFile
    journal: Journal
    stop_requests: StopRequests

    def close(self) -> None:
        """End the loader workers, and the commit thread once it has nothing left to do."""
        self.commits.close()
        for runner in self.runners:
            runner.close()

    def create_module_transforms(self) -> None:
        """Create the module transforms, once the counters have counted or were restored."""
        self.module_transforms.update(create_module_transforms(self.experiment, self.processes.device))


def create_module_transforms(experiment: Experiment, device: torch.device) -> dict[str, Any]:
    """Create the module transform of every dataset."""
    components = experiment.components
    counters = {name: entry.counter for name, entry in components.data_counters.items()}
    seed_generators(experiment.settings.training.seed, "module transforms")
    return {
        name: definition.create(dict(counters), device, LOGGER)
        for name, definition in components.module_transforms.items()
    }


def build_session(
    paths: ExperimentPaths, processes: Processes, experiment: Experiment, store: ResultsStore
) -> TrainingSession:
    """Put together what an assembled experiment needs to run on these processes."""
    records = Records(experiment.settings.loss_registers, experiment.learning_rates())
    engine = create_engine(experiment, processes)
    transforms: dict[str, Any] = {}
    train, val = (BatchRunner(experiment, processes, split, transforms) for split in ("train", "val"))
    training = TrainingStage(experiment, processes, train, engine, records)
    if experiment.settings.training.sync_batchnorm:
        _check_even_steps(training.plan, processes)
    parts = PersistedParts(experiment, records, processes)
    parts.run_values = [
        RunValue(_NUM_SKIPPED, partial(getattr, training, _NUM_SKIPPED), partial(setattr, training, _NUM_SKIPPED)),
        RunValue("grad_scaler", engine.scaler.state_dict, engine.scaler.load_state_dict),
        RunValue("requires_grad", engine.flags_state, engine.load_flags, has_default=True),
    ]
    return TrainingSession(
        paths=paths,
        processes=processes,
        experiment=experiment,
        records=records,
        parts=parts,
        module_transforms=transforms,
        engine=engine,
        ranks=RankComparison(experiment, processes, engine, parts, store.claim.folder),
        runners=(train, val),
        training=training,
        evaluation=EvaluationStage(experiment, processes, val, records),
        pictures=Pictures(experiment, val, transforms),
        store=store,
        commits=Commits(store, in_background=experiment.settings.training.checkpoint_in_background),
        status=StatusFile(paths.status_file),
        journal=Journal(paths.journal_file, processes.rank),
        stop_requests=StopRequests(
            store.claim.stop_file if processes.is_rank_zero else None, has_launcher=processes.has_launcher
        ),
    )


def create_engine(experiment: Experiment, processes: Processes) -> GradientEngine:
    """Return the engine that the settings ask for."""
    if experiment.is_sharded:
        return FsdpEngine(experiment, processes)
    return _ENGINES[experiment.settings.training.gradient_reduction](experiment, processes)


def _check_even_steps(plan: StepPlan, processes: Processes) -> None:
    """SyncBatchNorm waits for all ranks in every batch, so all must run the same dataset, each with a batch of it."""
    for index in range(len(plan)):
        for dataset, count in Counter(place.shape.dataset for place in plan.step(index)).items():
            if count % processes.world_size:
                what = (
                    f"needs steps in which the number of each dataset's batches is a multiple of the "
                    f"{processes.world_size} processes, but step {index + 1} has {count} of dataset {dataset!r}"
                )
                fix = "set it to false, or choose step_min_items, batch sizes and splits that divide evenly"
                raise InvalidExperiment([Problem("settings/training.json (sync_batchnorm)", what, fix)]).shared()
