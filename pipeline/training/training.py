"""The training stage: one epoch of steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext

import torch

from pipeline.checkpoint.records import Records
from pipeline.components import BaseLossWeighter
from pipeline.distributed.processes import Processes
from pipeline.experiment.assembly import Experiment
from pipeline.system.seeding import seed_generators
from pipeline.training.averages import Averages
from pipeline.training.batch_runner import BatchRunner, Key, out_of_memory_explained
from pipeline.training.buffers import preserved_buffers
from pipeline.training.engines.base import GradientEngine
from pipeline.training.loaders import LoadedBatch, Prefetcher
from pipeline.training.losses import LossAccumulator
from pipeline.training.step import BatchLosses, StepObserver, StepReport, StepRequests
from pipeline.training.step_plan import BatchAssignment, BatchRef, assign_rounds, assign_shares, create_plan
from pipeline.training.whole_step import WholeStep

# Steps whose losses wait on the device before the host reads them all at once.
_MAX_PENDING_STEPS = 64
_MAX_SHOWN_POINTS = 8


class TrainingStage:
    """One epoch of steps::

        before_train_epoch
        for each step:
            count the items of the step, if its batches must be loaded for that
            compute the losses that couple the rows of the whole step, if there are any
            for each of this rank's batches:
                load → forward → losses → backward
            reduce the gradients once → clip and step, or skip
            averages follow, schedule and weigh
            report the step: the caller may log, commit or stop here
        after_train_epoch

    The losses of the steps stay on the device until someone wants to see them.
    """

    def __init__(
        self,
        experiment: Experiment,
        processes: Processes,
        runner: BatchRunner,
        engine: GradientEngine,
        records: Records,
        averages: Averages,
    ) -> None:
        self._experiment = experiment
        self._averages = averages
        self._processes = processes
        self._runner = runner
        self._engine = engine
        self._records = records
        self._settings = experiment.settings.training
        self.plan = create_plan(runner.shapes, experiment.settings, experiment.max_steps)
        self._assign = assign_rounds if experiment.runs_in_rounds else assign_shares
        self._whole_step = WholeStep(experiment, processes, runner, engine)
        self._weighter = experiment.components.loss_weighter
        # A weighter that is called after every step must find that step's losses in the records.
        after_step = getattr(type(self._weighter), "after_train_step", None)
        self._weighter_sees_steps = after_step not in (None, BaseLossWeighter.after_train_step)
        self._max_pending = 1 if self._weighter_sees_steps else _MAX_PENDING_STEPS
        self._registers = experiment.settings.registers_of("train")
        transforms = experiment.components.module_transforms.values()
        self._counts_items = any(definition.counts_items for definition in transforms)
        names = [register.name for register in self._registers]
        self._accumulator = LossAccumulator(names, self.plan.max_batches, processes)
        # How many steps have losses that are still on the device.
        self._num_pending = 0
        self.observer = StepObserver()
        self.num_consecutive_skipped = 0

    def run(self, epoch: int, first_step: int, requests: Callable[[], StepRequests]) -> Iterator[StepReport]:
        """Yield after each step from ``first_step`` on; the epoch is complete when this is exhausted."""
        self._experiment.set_training(True)
        definitions = self._experiment.components.optim_sched
        self._schedulers = [
            scheduler
            for name, scheduler in self._experiment.schedulers.items()
            if epoch >= definitions[name].scheduler_start_epoch
        ]
        if first_step == 0:
            self._records.forget_steps()
            seed_generators(self._settings.seed, "begin", epoch)
            self._weighter.before_train_epoch(self._records.losses)
            for scheduler in self._schedulers:
                # Also of an epoch that max_steps cuts: rates must not depend on where the training ends.
                scheduler.before_train_epoch(self.plan.num_steps)
        rank = self._processes.rank
        refs = list(self.plan.refs_of(epoch, rank, self._processes.world_size, first_step, self._assign))
        loading = Prefetcher(self._runner.load(refs, self._runner.points(epoch)))
        with self._engine.prefetching(loading.load):
            for index in range(first_step, self.plan.steps_of(epoch)):
                yield self._step(epoch, index, loading, requests)
        self.flush()
        self._records.finish_train_epoch(epoch)
        seed_generators(self._settings.seed, "end", epoch)
        for scheduler in self._schedulers:
            scheduler.after_train_epoch()
        self._weighter.after_train_epoch(self._records.losses)

    def _step(
        self, epoch: int, index: int, loading: Prefetcher[LoadedBatch], requests: Callable[[], StepRequests]
    ) -> StepReport:
        started = time.perf_counter()
        loaded = loading.seconds
        self.observer.step_begins(epoch, index + 1)
        batches = self.plan.step(epoch, index)
        assignments = self._assign(list(enumerate(batches)), self._processes.rank, self._processes.world_size)
        if self._counts_items:
            items = self._sum_counted_items(assignments, loading)
        else:
            items = self._add_items(self._runner.items(None, ref) for ref in batches)
        scales = self._loss_scales(items)
        rates = self._experiment.learning_rates()

        step_key = (self._settings.seed, "step", epoch, index)
        # Before the engine begins: what buffers are by then is what the step starts from.
        self._whole_step.begin_step(step_key, batches, assignments, loading, scales)
        self._engine.begin_step(len(batches))
        for assignment in assignments:
            key = (*step_key, assignment.position)
            # Which ranks ask to stop or commit travels with the gradients of each rank's last batch.
            asked = requests() if assignment is assignments[-1] else None
            # The batch has no name here: it must be freed before the next one is loaded onto the device.
            self._run_batch(next(loading), assignment, key, scales, asked)
        if not assignments:
            self._engine.join_without_batch(requests())
        if self._num_pending + 1 == self._max_pending:
            # The losses are needed after this step; the engine's wait for the device is one for them too.
            self._accumulator.fetch()
        outcome = self._engine.finish_step((self._settings.seed, "update", epoch, index))
        self._averages.after_update(outcome.stepped, epoch)
        cause = self._find_cause(epoch, batches) if outcome.skipped and not outcome.overflowed else ""

        self._records.add_step_rates(rates, outcome.norms, outcome.skipped)
        self._num_pending += 1
        if self._num_pending == self._max_pending:
            self.flush()
        for scheduler in self._schedulers:
            scheduler.after_train_step(index + 1)
        if self._weighter_sees_steps:
            seed_generators(self._settings.seed, "after", epoch, index)
            self._weighter.after_train_step(self._records.losses)
        # A gradient that fp16 cannot hold does not count.
        is_bad = outcome.skipped and not outcome.overflowed
        self.num_consecutive_skipped = self.num_consecutive_skipped + 1 if is_bad else 0
        self.observer.step_ends(outcome)
        seconds = time.perf_counter() - started
        num_steps = self.plan.steps_of(epoch)
        return StepReport(index + 1, num_steps, seconds, loading.seconds - loaded, outcome, cause)

    def _run_batch(
        self,
        loaded: LoadedBatch,
        assignment: BatchAssignment,
        key: Key,
        scales: dict[str, float],
        requests: StepRequests | None,
    ) -> None:
        """Run one batch forward and backward."""
        # A stand-in only keeps the collectives of all ranks in step: it must leave no trace in the modules.
        modules = self._experiment.components.trained_modules.values() if assignment.is_stand_in else ()
        untraced = preserved_buffers(modules) if modules else nullcontext()
        with out_of_memory_explained(loaded.batch, assignment.ref, self._processes.device), untraced:
            self._engine.add_batch(assignment, self._forward(loaded, assignment, key, scales), requests)

    def _forward(
        self, loaded: LoadedBatch, assignment: BatchAssignment, key: Key, scales: dict[str, float]
    ) -> BatchLosses:
        """Run one batch through its module transform and record its losses; return those that are optimised."""
        position = assignment.position
        items = self._runner.items(loaded, assignment.ref)
        if assignment.is_stand_in:
            # Another rank records this batch; here its losses count zero times.
            losses = self._runner.losses(loaded, assignment.ref, items, key)
            optimised = [loss for register, loss in losses.items() if register in scales]
            return BatchLosses(optimised, [0.0] * len(optimised), [])
        self.observer.batch_is_loaded(position, assignment.ref, loaded.batch)
        is_coupled = self._whole_step.covers(assignment.ref)
        if is_coupled:
            losses = self._whole_step.losses(assignment)
        else:
            losses = self._runner.losses(loaded, assignment.ref, items, key)
        self.observer.losses_are_known(position, losses)
        sums = self._accumulator.add(self._num_pending, position, losses, items)
        names = [register for register in losses if register in scales]
        if is_coupled:
            # The factors of the losses are in the gradients of the rows.
            roots = self._whole_step.roots(loaded, assignment, key)
            return BatchLosses(roots, [1.0] * len(roots), [sums[name] for name in names])
        return BatchLosses(
            [losses[name] for name in names], [scales[name] for name in names], [sums[name] for name in names]
        )

    def _sum_counted_items(self, assignments: list[BatchAssignment], loading: Prefetcher[LoadedBatch]) -> list[int]:
        """Return how many items of all ranks each register gets in a step in which the data says how many.

        A mean needs the items of all ranks before the first backward pass, so this rank's batches are loaded now.
        """
        loaded = zip(assignments, loading.look_ahead(len(assignments)), strict=True)
        own = [self._runner.items(batch, given.ref) for given, batch in loaded if not given.is_stand_in]
        # On the CPU: the counts are there, and a device would have to be waited for.
        return self._processes.sum(torch.tensor(self._add_items(own))).tolist()

    def _add_items(self, batches: Iterable[Mapping[str, int]]) -> list[int]:
        """Return the number of items of each register in some batches, in the settings' order."""
        all_items = list(batches)
        return [sum(items.get(register.name, 0) for items in all_items) for register in self._registers]

    def _loss_scales(self, items: list[int]) -> dict[str, float]:
        """Return, for each optimised register, the factor of one item's loss in the step's loss."""
        is_mean = self._settings.loss_reduction == "mean"
        scale = self._engine.loss_scale
        return {
            register.name: scale * float(self._weighter.get_loss_weight(register.name)) / (count if is_mean else 1)
            for register, count in zip(self._registers, items, strict=True)
            if register.optimize and count
        }

    def _find_cause(self, epoch: int, batches: list[BatchRef]) -> str:
        """Return which loss of a skipped step is not finite, and in which points; called by all ranks."""
        optimised = {register.name for register in self._registers if register.optimize}
        own = [place for place in self._accumulator.find_not_finite(self._num_pending) if place[1] in optimised]
        found = sorted({place for places in self._processes.gather(own) for place in places})
        if not found:
            return ""
        position, register = found[0]
        if self._whole_step.covers(batches[position]):
            # One row spoils the values of all: the batch to look at is the one that has it.
            dataset = batches[position].shape.dataset
            spoilt = self._whole_step.find_not_finite(dataset)
            if spoilt is None:
                return f"{register} is not finite, though all rows of dataset {dataset} in the step are"
            position = spoilt
        batch = self._runner.points(epoch).batch(batches[position])
        shown = ", ".join(map(str, batch.indices[:_MAX_SHOWN_POINTS]))
        more = len(batch.indices) - _MAX_SHOWN_POINTS
        points = f"{shown} and {more} more" if more > 0 else shown
        return f"{register} is not finite in a batch of dataset {batch.dataset} (points {points})"

    def flush(self) -> None:
        """Bring the losses of the latest steps into the records; called by all ranks at the same step."""
        if self._num_pending:
            for totals, items in zip(*self._accumulator.collect(self._num_pending), strict=True):
                self._records.add_step_losses(totals, items.tolist())
            self._num_pending = 0
