"""Evaluation: a pass over the batches of a split, and the stage that does one over the validation splits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from pipeline.checkpoint.records import Records
from pipeline.distributed.processes import Processes
from pipeline.experiment.assembly import Experiment
from pipeline.system.seeding import seed_generators
from pipeline.training.batch_points import PlannedBatch
from pipeline.training.batch_runner import BatchRunner, out_of_memory_explained
from pipeline.training.buffers import preserved_buffers
from pipeline.training.loaders import Batch, LoadedBatch
from pipeline.training.losses import LossAccumulator, total_losses
from pipeline.training.metrics import MetricAccumulator
from pipeline.training.step_plan import (
    BatchAssignment,
    StepPlan,
    assign_rounds,
    assign_shares,
    evaluation_refs,
    share_of,
)

# Asking all ranks whether one was asked to stop is a collective; an evaluation that stops loses its own time only.
_ROUNDS_BETWEEN_STOP_CHECKS = 16

# Sees each batch of this rank when its losses are known, for example to predict.
BatchObserver = Callable[[BatchAssignment, PlannedBatch, Batch], None]


class EvaluationPass:
    """Runs the batches of one split through the modules, each exactly once at any number of processes.

    Shards and ranks take neighbouring batches, whose metrics they can combine at once.
    """

    def __init__(
        self,
        experiment: Experiment,
        processes: Processes,
        runner: BatchRunner,
        shard: tuple[int, int] = (0, 1),
        average: str | None = None,
    ) -> None:
        self._experiment = experiment
        # The average that stands in for its source.
        self._average = average
        self._processes = processes
        self._runner = runner
        self.refs = evaluation_refs(runner.shapes)
        self.batches = share_of(len(self.refs), *shard)
        chosen = [(position, self.refs[position]) for position in self.batches]
        rank = processes.rank
        world_size = processes.world_size
        if experiment.is_sharded:
            self._assignments = assign_rounds(chosen, rank, world_size)
            self.num_rounds = len(self._assignments)
        else:
            self._assignments = assign_shares(chosen, rank, world_size)
            # The same number on every rank: some have no batch in the last round.
            self.num_rounds = -(-len(chosen) // world_size)
        self.registers = [register.name for register in experiment.settings.registers_of("val")]
        self._accumulator = LossAccumulator(self.registers, len(self.refs), processes)
        self.metrics = MetricAccumulator(experiment.components.metrics, experiment.folder, processes)

    def rounds(self, epoch: int, observe: BatchObserver | None = None) -> Iterator[int]:
        """Yield the number of each round when its batches are done; ``observe`` sees those of this rank."""
        self._experiment.set_training(False)
        points = self._runner.points(epoch)
        loading = self._runner.load([assignment.ref for assignment in self._assignments], points)
        # An evaluation must leave no trace, as each rank would leave another.
        with preserved_buffers(self._experiment.components.all_modules.values()):
            for number in range(self.num_rounds):
                if number < len(self._assignments):
                    assignment = self._assignments[number]
                    self._run_batch(assignment, points.batch(assignment.ref), next(loading), observe)
                yield number

    def _run_batch(
        self, assignment: BatchAssignment, planned: PlannedBatch, loaded: LoadedBatch, observe: BatchObserver | None
    ) -> None:
        with torch.no_grad(), out_of_memory_explained(loaded.batch, assignment.ref, self._processes.device):
            items = self._runner.items(loaded, assignment.ref)
            with self._runner.average_swapped(self._average):
                losses, arguments = self._runner.evaluate(loaded, assignment.ref, items, (*planned.key, "evaluate"))
            # A stand-in is recorded by the rank whose batch it is.
            if not assignment.is_stand_in:
                self._accumulator.add(0, assignment.position, losses, items)
                self.metrics.add(assignment.position, arguments)
            if observe is not None:
                observe(assignment, planned, loaded.batch)

    def collect(self) -> tuple[np.ndarray, np.ndarray]:
        """Return sums and items per batch and register of all ranks; batches of other shards have 0."""
        sums, items = self._accumulator.collect_batches(1)
        return sums[0], items[0]

    def values(self) -> dict[str, tuple[float, int]]:
        """Return total and items of every register over the whole split; all ranks must ask."""
        sums, items = self.collect()
        totals = total_losses(sums[None])[0].tolist()
        return {
            **dict(zip(self.registers, zip(totals, items.sum(axis=0).tolist(), strict=True), strict=True)),
            # A metric has one value for the whole split.
            **{name: (value, 1) for name, value in self.metrics.collect().items()},
        }

    def planned_items(self) -> dict[str, int]:
        """Return how many items of the whole split each register gets if none are counted and none are absent."""
        planned = [self._runner.items(None, ref) for ref in self.refs]
        return {register: sum(items.get(register, 0) for items in planned) for register in self.registers}


class EvaluationStage:
    """One pass over the validation splits, each item exactly once at any number of processes."""

    def __init__(
        self,
        experiment: Experiment,
        processes: Processes,
        runner: BatchRunner,
        records: Records,
        plan: StepPlan,
        prepare_averages: Callable[[int], None],
    ) -> None:
        self._experiment = experiment
        self._processes = processes
        self._records = records
        self._plan = plan
        self._runner = runner
        self._prepare_averages = prepare_averages
        averages = experiment.components.averages.items()
        # By the name that registers of a pass begin with.
        self._passes = {"": EvaluationPass(experiment, processes, runner)} | {
            f"{name}/": EvaluationPass(experiment, processes, runner, average=name)
            for name, settings in averages
            if settings.evaluate == "beside"
        }

    @property
    def num_rounds(self) -> int:
        return sum(evaluation.num_rounds for evaluation in self._passes.values())

    def run(self, epoch: int, is_asked_to_stop: Callable[[], bool]) -> Iterator[bool]:
        """Yield after each round, False while it continues and True if all ranks agreed to stop instead.

        An evaluation is recorded whole or not at all: stopping one loses nothing but its own time.
        """
        weighter = self._experiment.components.loss_weighter
        seed = self._experiment.settings.training.seed
        seed_generators(seed, "before evaluation", epoch)
        weighter.before_eval_epoch(self._records.losses)
        self._prepare_averages(epoch)
        self._runner.position = self._plan.position_after(epoch)
        for evaluation in self._passes.values():
            for number in evaluation.rounds(epoch):
                if number % _ROUNDS_BETWEEN_STOP_CHECKS == 0 and self._processes.any(is_asked_to_stop()):
                    # Empties the accumulators for the evaluation that will be done again.
                    for begun in self._passes.values():
                        begun.collect()
                        begun.metrics.clear()
                    yield True
                    return
                yield False
        values = {
            f"{prefix}{name}": value
            for prefix, evaluation in self._passes.items()
            for name, value in evaluation.values().items()
        }
        for name, record in self._records.losses["val"].items():
            record.add_epoch(epoch, *values[name])
        seed_generators(seed, "after evaluation", epoch)
        weighter.after_eval_epoch(self._records.losses)
