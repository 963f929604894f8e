"""What an assembled experiment needs to run on these processes, put together."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pipeline.checkpoint.parts import PersistedParts, RunValue
from pipeline.checkpoint.records import Records
from pipeline.distributed.processes import Processes
from pipeline.experiment.assembly import Experiment
from pipeline.experiment.checks.data import check_even_steps
from pipeline.experiment.param_groups import ParamGroups
from pipeline.monitoring.journal import Journal
from pipeline.monitoring.status_file import StatusFile
from pipeline.paths import ExperimentPaths
from pipeline.store.background_commit import Commits
from pipeline.store.store import ResultsStore
from pipeline.store.weight_pools import STEPS_PER_EPOCH
from pipeline.system.stop_requests import StopRequests
from pipeline.training.averages import Averages, update_batchnorm
from pipeline.training.batch_runner import BatchRunner
from pipeline.training.engines.base import GradientEngine
from pipeline.training.engines.create import create_engine
from pipeline.training.evaluation import EvaluationStage
from pipeline.training.rank_comparison import RankComparison
from pipeline.training.samples import Samples
from pipeline.training.step_plan import PLAN_VERSION, check_plan_version
from pipeline.training.training import TrainingStage

_NUM_SKIPPED = "num_consecutive_skipped"


def _ignore(saved: object) -> None:
    """Load nothing: the value is for those who read a commit without a plan."""


@dataclass
class TrainingSession:
    """The parts a loop drives; rank zero alone has a store, a status file and trackers that do anything."""

    paths: ExperimentPaths
    processes: Processes
    experiment: Experiment
    records: Records
    parts: PersistedParts
    engine: GradientEngine
    ranks: RankComparison
    runners: tuple[BatchRunner, BatchRunner]
    training: TrainingStage
    evaluation: EvaluationStage
    samples: Samples
    store: ResultsStore
    commits: Commits
    status: StatusFile
    journal: Journal
    stop_requests: StopRequests
    # The epoch of the latest improvement and its validation values; empty before the first.
    best: dict[str, Any] = field(default_factory=dict)

    def close(self) -> None:
        """End the loader workers, and the commit thread once it has nothing left to do."""
        self.commits.close()
        for runner in self.runners:
            runner.close()


def build_session(
    paths: ExperimentPaths, processes: Processes, experiment: Experiment, store: ResultsStore
) -> TrainingSession:
    """Put together what an assembled experiment needs to run on these processes."""
    records = Records(experiment.settings.loss_registers, experiment.learning_rates())
    engine = create_engine(experiment, processes)
    train = BatchRunner(experiment, processes, "train")
    val = BatchRunner(experiment, processes, "val")
    averages = Averages(experiment)
    training = TrainingStage(experiment, processes, train, engine, records, averages)
    if experiment.settings.training.sync_batchnorm:
        steps = ([ref.shape.dataset for ref in step] for step in training.plan.different_steps())
        check_even_steps(steps, processes.world_size)
    parts = PersistedParts(experiment, records, processes)
    session = TrainingSession(
        paths=paths,
        processes=processes,
        experiment=experiment,
        records=records,
        parts=parts,
        engine=engine,
        ranks=RankComparison(experiment, processes, engine, parts, store.claim.folder),
        runners=(train, val),
        training=training,
        evaluation=EvaluationStage(
            experiment,
            processes,
            val,
            records,
            training.plan,
            partial(update_batchnorm, experiment, train, training.plan),
        ),
        samples=Samples(experiment, processes, val),
        store=store,
        commits=Commits(store, in_background=experiment.settings.training.checkpoint_in_background),
        status=StatusFile(paths.status_file),
        journal=Journal(paths.journal_file, processes.rank),
        stop_requests=StopRequests(
            store.claim.stop_file if processes.is_rank_zero else None, has_launcher=processes.has_launcher
        ),
    )
    groups = ParamGroups(experiment.components.trained_modules, experiment.optimizers)
    # Small JSON values that must survive a kill: one row each.
    parts.run_values = [
        RunValue("best", partial(getattr, session, "best"), partial(setattr, session, "best"), has_default=True),
        RunValue(_NUM_SKIPPED, training.skips_state, training.load_skips),
        # Commits that do not say so were planned by version 1.
        # An evaluation says how many steps its weights have taken.
        RunValue(STEPS_PER_EPOCH, partial(int, training.plan.num_steps), _ignore, has_default=True),
        RunValue("plan_version", partial(int, PLAN_VERSION), check_plan_version, missing=1),
        RunValue("grad_scaler", engine.scaler.state_dict, engine.scaler.load_state_dict),
        RunValue("requires_grad", engine.flags_state, engine.load_flags, has_default=True),
        RunValue("averages", averages.state, averages.load_state, has_default=True),
        RunValue("param_groups", groups.as_json, groups.rebuild, has_default=True, precedes_tensors=True),
    ]
    return session
