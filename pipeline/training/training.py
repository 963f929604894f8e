"""The training stage: one epoch of steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from pipeline.checkpoint.records import Records
from pipeline.components import BaseLossWeighter
from pipeline.distributed.processes import Processes
from pipeline.experiment.assembly import Experiment
from pipeline.experiment.turns import Turn, TurnPlan
from pipeline.system.seeding import seed_generators
from pipeline.training.anomaly import anomaly_explained
from pipeline.training.averages import Averages
from pipeline.training.batch_runner import BatchRunner, Key, out_of_memory_explained
from pipeline.training.buffers import preserved_buffers
from pipeline.training.engines.base import GradientEngine
from pipeline.training.hooks import Hooks
from pipeline.training.loaders import LoadedBatch, Prefetcher
from pipeline.training.losses import LossAccumulator
from pipeline.training.step import BatchLosses, StepObserver, StepOutcome, StepReport, StepRequests
from pipeline.training.step_plan import BatchAssignment, BatchRef, assign_rounds, assign_shares, create_plan
from pipeline.training.whole_step import WholeStep

# Steps whose losses wait on the device before the host reads them all at once.
_MAX_PENDING_STEPS = 64
_MAX_SHOWN_POINTS = 8
_NOTHING = frozenset[str]()


class TrainingStage:
    """One epoch of steps::

        after_evaluation of schedulers and hooks, if the epoch before was evaluated
        before_train_epoch
        for each step:
            count the items of the step, if its batches must be loaded for that
            compute the losses that couple the rows of the whole step, if there are any
            for each turn, of which most steps have one:
                for each of this rank's batches:
                    load → forward → losses → backward
                reduce the gradients → clip and step, or skip
                averages follow
            schedule and weigh
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
        self.hooks = Hooks(experiment, processes, engine, records, self.plan)
        # So must a hook.
        sees_steps = self._weighter_sees_steps or self.hooks.has("after_train_step")
        self._max_pending = 1 if sees_steps else _MAX_PENDING_STEPS
        self._registers = experiment.settings.registers_of("train")
        transforms = experiment.components.module_transforms.values()
        self._counts_items = any(definition.counts_items for definition in transforms)
        # The counts of the next step, and what waits until those of all ranks are added.
        self._counting: tuple[torch.Tensor, Callable[[], object]] | None = None
        names = [register.name for register in self._registers]
        self._accumulator = LossAccumulator(names, self.plan.max_batches, processes)
        per_update = {name: getattr(one, "turns_per_step", 1) for name, one in experiment.optimizers.items()}
        self._turns = TurnPlan(experiment.components.optim_sched, experiment.settings, per_update)
        # How many steps have losses that are still on the device.
        self._num_pending = 0
        self.observer = StepObserver()
        # By optimizer, how many of its latest turns were skipped because something was not finite.
        self._skips_in_a_row = dict.fromkeys(experiment.optimizers, 0)
        # Of the steps whose losses are on the device, the registers of turns that were skipped alone.
        self._left_out: list[frozenset[str]] = []

    @property
    def num_consecutive_skipped(self) -> int:
        """How often in a row an optimizer was kept from its update by something that is not finite, at most."""
        return max(self._skips_in_a_row.values(), default=0)

    def skips_state(self) -> int | dict[str, int]:
        """Return the skips in a row for a commit: by optimizer where they differ."""
        differing = set(self._skips_in_a_row.values())
        return dict(self._skips_in_a_row) if len(differing) > 1 else max(differing, default=0)

    def load_skips(self, state: int | dict[str, int]) -> None:
        by_optimizer = state if isinstance(state, dict) else dict.fromkeys(self._skips_in_a_row, state)
        self._skips_in_a_row |= by_optimizer

    def begin(self) -> None:
        """Call what acts once in the life of an experiment, before its first commit."""
        if self.hooks.has("at_start"):
            self.hooks.call("at_start", 0)
            self._averages.begin()

    def run(self, epoch: int, first_step: int, requests: Callable[[], StepRequests]) -> Iterator[StepReport]:
        """Yield after each step from ``first_step`` on; the epoch is complete when this is exhausted."""
        self._counting = None
        self._experiment.set_training(True)
        definitions = self._experiment.components.optim_sched
        self._schedulers = {
            name: scheduler
            for name, scheduler in self._experiment.schedulers.items()
            if epoch >= definitions[name].scheduler_start_epoch
        }
        if first_step == 0:
            self._follow_evaluation(epoch - 1)
            self._records.forget_steps()
            seed_generators(self._settings.seed, "begin", epoch)
            self._weighter.before_train_epoch(self._records.losses)
            for name, scheduler in self._schedulers.items():
                # Also of an epoch that max_steps cuts: rates must not depend on where the training ends.
                scheduler.before_train_epoch(len(self._updates_in(name, epoch, 0, self.plan.num_steps)))
            self.hooks.call("before_train_epoch", epoch)
        rank = self._processes.rank
        own = (epoch, rank, self._processes.world_size, first_step, self._assign)
        refs = list(self.plan.refs_of(*own))
        loading = Prefetcher(self._runner.load(refs, self._runner.points(epoch), self.plan.positions_of(*own)))
        with self._engine.prefetching(loading.load):
            for index in range(first_step, self.plan.steps_of(epoch)):
                yield self._step(epoch, index, loading, requests)
        self.flush()
        self._records.finish_train_epoch(epoch)
        seed_generators(self._settings.seed, "end", epoch)
        for scheduler in self._schedulers.values():
            scheduler.after_train_epoch()
        self._weighter.after_train_epoch(self._records.losses)
        self.hooks.call("after_train_epoch", epoch, self.plan.steps_of(epoch))

    def _follow_evaluation(self, epoch: int) -> None:
        """Show the latest evaluation to schedulers and hooks, if it is that of this epoch.

        Not when it was done, but when the training continues: nothing that they change would be in its commit. A kill
        before the next commit repeats the calls, with the same records.
        """
        if not self._records.is_evaluated(epoch):
            return
        seed_generators(self._settings.seed, "evaluated", epoch)
        for scheduler in self._schedulers.values():
            # An author's own need not have the method.
            act = getattr(scheduler, "after_evaluation", None)
            if act is not None:
                act(self._records.losses)
        self.hooks.call("after_evaluation", epoch)

    def _step(
        self, epoch: int, index: int, loading: Prefetcher[LoadedBatch], requests: Callable[[], StepRequests]
    ) -> StepReport:
        started = time.perf_counter()
        loaded = loading.seconds
        self.observer.step_begins(epoch, index + 1)
        position = self.plan.position(epoch, index + 1)
        self._runner.position = position
        batches = self.plan.step(epoch, index)
        assignments = self._assignments(batches)
        if self._counts_items:
            items = self._counted_items(assignments, loading)
        else:
            items = self._add_items(self._runner.items(None, ref) for ref in batches)
        turns = self._turns.of_step((epoch - 1) * self.plan.num_steps + index)
        scales = self._loss_scales(items)
        rates = self._experiment.learning_rates()

        step_key = (self._settings.seed, "step", epoch, index)
        # Before the engine begins: what buffers are by then is what the step starts from.
        self._whole_step.begin_step(step_key, batches, assignments, loading, scales)
        outcomes = []
        for turn in turns:
            is_last = turn is turns[-1]
            self._runner.position = replace(position, turn=turn.number) if turn.number else position
            self._engine.begin_step(len(batches), turn)
            # Turns that share the step's batches find them loaded.
            loaded_batches = loading if is_last else iter(loading.look_ahead(len(assignments)))
            # Which ranks ask to stop or commit travels with the last turn.
            asked = requests if is_last else StepRequests
            self._run_batches(step_key, turn, assignments, loaded_batches, scales, asked)
            if is_last and self._num_pending + 1 == self._max_pending:
                # The losses are needed after this step; the engine's wait for the device is one for them too.
                self._accumulator.fetch()
            outcomes.append(self._engine.finish_step((self._settings.seed, "update", epoch, index, *turn.key)))
            self._averages.after_update(outcomes[-1].stepped, epoch)
        outcome = outcomes[0] if len(outcomes) == 1 else StepOutcome.of_turns(outcomes)
        num_steps = self.plan.steps_of(epoch)
        if self._counts_items and index + 1 < num_steps and not outcome.stop:
            self._begin_counting(self._assignments(self.plan.step(epoch, index + 1)), loading)
        skipped = [turn for turn, one in zip(turns, outcomes, strict=True) if one.skipped]
        skipped_alone = tuple(name for turn in skipped for name in turn.optimizers) if not outcome.skipped else ()
        is_bad = bool(skipped) and not outcome.overflowed
        cause = self._find_cause(epoch, batches) if is_bad else ""

        self._records.add_step_rates(rates, outcome.norms, outcome.skipped)
        self._left_out.append(
            frozenset[str]().union(*(turn.recorded for turn in skipped)) if skipped_alone else _NOTHING
        )
        self._num_pending += 1
        if self._num_pending == self._max_pending:
            self.flush()
        for name, scheduler in self._schedulers.items():
            # It follows the updates of its own optimizer.
            for update in self._updates_in(name, epoch, index):
                scheduler.after_train_step(update)
        if self._weighter_sees_steps:
            seed_generators(self._settings.seed, "after", epoch, index)
            self._weighter.after_train_step(self._records.losses)
        self.hooks.call_after_step(epoch, index + 1)
        for turn, one in zip(turns, outcomes, strict=True):
            for name in turn.optimizers:
                # A gradient that fp16 cannot hold does not count.
                is_counted = one.skipped and not one.overflowed
                self._skips_in_a_row[name] = self._skips_in_a_row[name] + 1 if is_counted else 0
        self.observer.step_ends(outcome)
        seconds = time.perf_counter() - started
        return StepReport(index + 1, num_steps, seconds, loading.seconds - loaded, outcome, cause, skipped_alone)

    def _run_batches(
        self,
        step_key: Key,
        turn: Turn,
        assignments: list[BatchAssignment],
        loaded: Iterator[LoadedBatch],
        scales: dict[str, float],
        requests: Callable[[], StepRequests],
    ) -> None:
        """Run this rank's batches of a step forward and backward; the last one brings its requests."""
        for assignment in assignments:
            key = (*step_key, assignment.position, *turn.key)
            asked = requests() if assignment is assignments[-1] else None
            with self._anomaly_explained(step_key, assignment.ref):
                # The batch has no name here: it must be freed before the next one is loaded onto the device.
                self._run_batch(next(loaded), assignment, turn, key, scales, asked)
        if not assignments:
            self._engine.join_without_batch(requests())

    def _run_batch(
        self,
        loaded: LoadedBatch,
        assignment: BatchAssignment,
        turn: Turn,
        key: Key,
        scales: dict[str, float],
        requests: StepRequests | None,
    ) -> None:
        """Run one batch forward and backward."""
        # A stand-in only keeps the collectives of all ranks in step: it must leave no trace in the modules.
        modules = self._experiment.components.trained_modules.values() if assignment.is_stand_in else ()
        untraced = preserved_buffers(modules) if modules else nullcontext()
        with out_of_memory_explained(loaded.batch, assignment.ref, self._processes.device), untraced:
            self._engine.add_batch(assignment, self._forward(loaded, assignment, turn, key, scales), requests)

    def _forward(
        self, loaded: LoadedBatch, assignment: BatchAssignment, turn: Turn, key: Key, scales: dict[str, float]
    ) -> BatchLosses:
        """Run one batch through its module transform and record its losses; return those that an optimizer follows."""
        position = assignment.position
        items = self._runner.items(loaded, assignment.ref)
        if assignment.is_stand_in:
            # Another rank records this batch; here its losses count zero times.
            losses = self._runner.losses(loaded, assignment.ref, items, key, turn.needed)
            followed = {name: loss for name, loss in losses.items() if name in scales and name in turn.needed}
            return BatchLosses(followed, dict.fromkeys(followed, 0.0), {})
        # Turns that share batches see each again: their batches are numbered on.
        seen = position + (turn.number * self.plan.max_batches if turn.key else 0)
        self.observer.batch_is_loaded(seen, assignment.ref, loaded.batch)
        is_coupled = self._whole_step.covers(assignment.ref)
        if is_coupled:
            losses = self._whole_step.losses(assignment)
        else:
            losses = self._runner.losses(loaded, assignment.ref, items, key, turn.needed)
        self.observer.losses_are_known(seen, losses)
        sums = self._accumulator.add(self._num_pending, position, losses, items, turn.recorded)
        followed = {name: loss for name, loss in losses.items() if name in scales and name in turn.needed}
        followed_sums = {name: sums[name] for name in followed}
        if is_coupled:
            # The factors of the losses are in the gradients of the rows.
            roots = self._whole_step.roots(loaded, assignment, key)
            return BatchLosses(roots, dict.fromkeys(roots, 1.0), followed_sums)
        return BatchLosses(followed, scales, followed_sums)

    def _assignments(self, batches: list[BatchRef]) -> list[BatchAssignment]:
        """Return which batches of a step are this rank's."""
        return self._assign(list(enumerate(batches)), self._processes.rank, self._processes.world_size)

    def _begin_counting(self, assignments: list[BatchAssignment], loading: Prefetcher[LoadedBatch]) -> None:
        """Begin to add up over the ranks how many items each register gets in a step.

        A mean needs the items of all ranks before the first backward pass, so this rank's batches are loaded now.
        """
        loading.load(len(assignments))
        # All ranks take part, also one that could not load its batches: it says so when it asks for them.
        loaded = zip(assignments, loading.loaded, strict=False)
        own = [self._runner.items(batch, given.ref) for given, batch in loaded if not given.is_stand_in]
        # On the CPU: the counts are there, and a device would have to be waited for.
        counts = torch.tensor(self._add_items(own))
        self._counting = (counts, self._processes.sum_async(counts))

    def _counted_items(self, assignments: list[BatchAssignment], loading: Prefetcher[LoadedBatch]) -> list[int]:
        """Return how many items of all ranks each register gets in a step in which the data says how many."""
        if self._counting is None:
            # In the first step of an epoch or of a run; later ones were counted while the step before ended.
            self._begin_counting(assignments, loading)
        assert self._counting is not None
        # Raises what went wrong while they were loaded.
        loading.look_ahead(len(assignments))
        counts, wait = self._counting
        self._counting = None
        wait()
        return counts.tolist()

    def _add_items(self, batches: Iterable[Mapping[str, int]]) -> list[int]:
        """Return the number of items of each register in some batches, in the settings' order."""
        totals = {register.name: 0 for register in self._registers}
        for items in batches:
            for name, count in items.items():
                totals[name] += count
        return list(totals.values())

    def _updates_in(self, optimizer: str, epoch: int, index: int, num_steps: int = 1) -> range:
        """Return the numbers, in an epoch and from 1, of the updates of an optimizer in some steps."""
        if self._turns.is_every_step:
            return range(index + 1, index + num_steps + 1)
        first = (epoch - 1) * self.plan.num_steps
        before = self._turns.updates_before(optimizer, first)
        begin = self._turns.updates_before(optimizer, first + index)
        end = self._turns.updates_before(optimizer, first + index + num_steps)
        return range(begin - before + 1, end - before + 1)

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
        return f"{register} is not finite in {self._describe_points(epoch, batches[position])}"

    def _anomaly_explained(self, step_key: Key, ref: BatchRef) -> AbstractContextManager[None]:
        """Explain what ``--detect-anomaly`` finds in this block, if it was asked for."""
        if not torch.is_anomaly_enabled():
            return nullcontext()
        epoch, index = map(int, step_key[2:])
        return anomaly_explained(lambda: f"epoch {epoch}, step {index + 1}, {self._describe_points(epoch, ref)}")

    def _describe_points(self, epoch: int, ref: BatchRef) -> str:
        """Return the dataset of a batch and its points, in words."""
        batch = self._runner.points(epoch).batch(ref)
        shown = ", ".join(map(str, batch.indices[:_MAX_SHOWN_POINTS]))
        more = len(batch.indices) - _MAX_SHOWN_POINTS
        points = f"{shown} and {more} more" if more > 0 else shown
        return f"a batch of dataset {batch.dataset} (points {points})"

    def flush(self) -> None:
        """Bring the losses of the latest steps into the records; called by all ranks at the same step."""
        if self._num_pending:
            names = [register.name for register in self._registers]
            rows = zip(*self._accumulator.collect(self._num_pending), self._left_out, strict=True)
            for totals, items, left_out in rows:
                for column in (names.index(name) for name in left_out):
                    # As if the turn had no batch: the other turns of the step count.
                    totals[column] = items[column] = 0
                self._records.add_step_losses(totals, items.tolist())
            self._num_pending = 0
            self._left_out.clear()
