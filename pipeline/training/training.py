"""The training stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.checkpoint.records import Records
from pipeline.components import BaseLossWeighter
from pipeline.distributed.processes import Processes
from pipeline.errors import PipelineError
from pipeline.experiment.assembly import Experiment
from pipeline.system.seeding import seed_generators
from pipeline.training.batch_runner import BatchRunner, out_of_memory_explained
from pipeline.training.engines.base import BatchLosses, Compute, GradientEngine, StepOutcome, StepRequests
from pipeline.training.loaders import Prefetcher
from pipeline.training.losses import LossAccumulator
from pipeline.training.step_observer import StepObserver
from pipeline.training.step_plan import BatchAssignment, BatchRef, StepPlan, assign_rounds, assign_shares

_ROWS = 64


@dataclass(frozen=True)
class StepReport:
    """What the loop around the stage learns of one step."""

    step: int
    num_steps: int
    seconds: float
    data_seconds: float
    outcome: StepOutcome


class TrainingStage:
    """One epoch of steps::

        before_train_epoch
        for each step:
            for each of this rank's batches:
                load → forward → losses → backward
            reduce the gradients once → clip and step, or skip
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
    ) -> None:
        self._experiment = experiment
        self._processes = processes
        self._runner = runner
        self._engine = engine
        self._records = records
        self._settings = experiment.settings.training
        self.plan = StepPlan(runner.shapes, experiment.settings.step_min_items)
        self._deal = assign_rounds if experiment.runs_in_rounds else assign_shares
        self._weighter = experiment.components.loss_weighter
        self._looks_at_steps = _overrides(self._weighter, "after_train_step")
        registers = experiment.settings.register_names
        feeds = experiment.components.module_transforms
        self._fed_by = [
            [name for name, one in feeds.items() if register in one.loss_registers] for register in registers
        ]
        self._rows = 1 if self._looks_at_steps else _ROWS
        self._accumulator = LossAccumulator(registers, self.plan.max_batches, processes)
        self._pending: list[list[int]] = []
        self.observer = StepObserver()
        self.num_consecutive_skipped = 0

    def run(self, epoch: int, first_step: int, requests: Callable[[], StepRequests]) -> Iterator[StepReport]:
        """Yield after each step from ``first_step`` on; the epoch is complete when this is exhausted."""
        self._experiment.set_training(True)
        self._schedulers = self._active_schedulers(epoch)
        if first_step == 0:
            self._begin_epoch(epoch)
        refs = list(self.plan.refs_of(self._processes.rank, self._processes.world_size, first_step, self._deal))
        points = self._runner.points(epoch)
        loading = Prefetcher(self._runner.load(refs, points))
        with self._engine.using_waits_for(loading.load):
            for index in range(first_step, len(self.plan)):
                yield self._step(epoch, index, loading, requests)
        self._end_epoch(epoch)

    def _begin_epoch(self, epoch: int) -> None:
        self._records.forget_steps()
        seed_generators(self._settings.seed, "begin", epoch)
        self._weighter.before_train_epoch(self._records.losses)
        for scheduler in self._schedulers:
            scheduler.before_train_epoch(len(self.plan))

    def _end_epoch(self, epoch: int) -> None:
        self.flush()
        self._records.finish_train_epoch(epoch)
        seed_generators(self._settings.seed, "end", epoch)
        for scheduler in self._schedulers:
            scheduler.after_train_epoch()
        self._weighter.after_train_epoch(self._records.losses)

    def _active_schedulers(self, epoch: int) -> list[Any]:
        definitions = self._experiment.components.optim_sched
        return [
            scheduler
            for name, scheduler in self._experiment.schedulers.items()
            if epoch >= definitions[name].scheduler_start_epoch
        ]

    def _step(self, epoch: int, index: int, loading: Prefetcher, requests: Callable[[], StepRequests]) -> StepReport:
        started = time.perf_counter()
        loaded = loading.seconds
        self.observer.step_begins(epoch, index + 1)
        batches = self.plan.step(index)
        items = self._num_items(batches)
        shares = self._shares(items)
        rates = self._experiment.learning_rates()
        self._engine.begin_step(len(batches))
        own = self._deal(list(enumerate(batches)), self._processes.rank, self._processes.world_size)
        for assignment in own:
            self._run(assignment, next(loading), (epoch, index), shares, requests() if assignment is own[-1] else None)
        if not own:
            self._engine.join_without_batch(requests())
        if len(self._pending) + 1 == self._rows:
            # The losses are needed after this step; the engine's wait for the device is one for them too.
            self._accumulator.fetch()
        outcome = self._engine.finish_step((self._settings.seed, "update", epoch, index))
        self._records.add_step_rates(rates, outcome.norms, outcome.skipped)
        self._after_step(epoch, index, items, outcome)
        self.observer.step_ends(outcome)
        seconds = time.perf_counter() - started
        data_seconds = loading.seconds - loaded
        return StepReport(index + 1, len(self.plan), seconds, data_seconds, outcome)

    def _run(
        self,
        assignment: BatchAssignment,
        batch: Any,
        at: tuple[int, int],
        shares: dict[str, float],
        requests: StepRequests | None,
    ) -> None:
        key = (self._settings.seed, "step", *at, assignment.position)
        with out_of_memory_explained(batch, assignment.ref, self._processes.device):
            if assignment.is_stand_in:
                self._engine.stand_in(self._stand_in_loss(batch, assignment.ref, key, shares), requests)
            else:
                self._engine.backward(assignment, self._batch_loss(batch, assignment.ref, key, shares), requests)

    def _stand_in_loss(self, batch: Any, ref: BatchRef, key: tuple[Any, ...], shares: dict[str, float]) -> Compute:
        """A zero-weighted forward and backward pass, which keeps the collectives of FSDP in step."""

        def compute() -> BatchLosses:
            losses = self._runner.losses(batch, ref, key)
            optimised = [losses[register] for register in losses if register in shares]
            return BatchLosses(optimised, [0.0] * len(optimised), [])

        return compute

    def _batch_loss(self, batch: Any, ref: BatchRef, key: tuple[Any, ...], shares: dict[str, float]) -> Compute:
        row = len(self._pending)
        position = key[-1]

        def compute() -> BatchLosses:
            self.observer.batch_is_loaded(position, ref, batch)
            losses = self._runner.losses(batch, ref, key)
            self.observer.losses_are_known(position, losses)
            sums = self._accumulator.add(row, position, losses)
            optimised = [register for register in losses if register in shares]
            return BatchLosses(
                [losses[register] for register in optimised],
                [shares[register] for register in optimised],
                [sums[register] for register in optimised],
            )

        return compute

    def _shares(self, items: list[int]) -> dict[str, float]:
        """Return, for each optimised register, the factor of one item's loss in the step's loss."""
        is_mean = self._settings.loss_reduction == "mean"
        scale = self._engine.loss_scale
        return {
            register.name: scale * float(self._weighter.get_loss_weight(register.name)) / (count if is_mean else 1)
            for register, count in zip(self._experiment.settings.loss_registers, items, strict=True)
            if register.optimize and count
        }

    def _num_items(self, batches: list[BatchRef]) -> list[int]:
        """Return how many items of all ranks each register gets in a step."""
        items: dict[str, int] = {}
        for ref in batches:
            items[ref.shape.dataset] = items.get(ref.shape.dataset, 0) + ref.num_items
        return [sum(items.get(dataset, 0) for dataset in datasets) for datasets in self._fed_by]

    def _after_step(self, epoch: int, index: int, items: list[int], outcome: StepOutcome) -> None:
        self._pending.append(items)
        if len(self._pending) == self._rows:
            self.flush()
        for scheduler in self._schedulers:
            scheduler.after_train_step(index + 1)
        if self._looks_at_steps:
            seed_generators(self._settings.seed, "after", epoch, index)
            self._weighter.after_train_step(self._records.losses)
        self._count_skipped(epoch, index, outcome)

    def _count_skipped(self, epoch: int, index: int, outcome: StepOutcome) -> None:
        """Abort when too many steps in a row were skipped; a gradient that fp16 cannot hold does not count."""
        is_bad = outcome.skipped and not outcome.overflowed
        self.num_consecutive_skipped = self.num_consecutive_skipped + 1 if is_bad else 0
        allowed = self._settings.max_consecutive_nan_steps
        if self.num_consecutive_skipped > allowed:
            raise PipelineError(
                f"{self.num_consecutive_skipped} steps in a row had a loss or gradient that is not finite, the last at "
                f"epoch {epoch}, step {index + 1}; training.json allows max_consecutive_nan_steps: {allowed}.\n"
                "  fix: lower the learning rate or set grad_clip_norm; --resume --detect-anomaly names the operation."
            ).shared()

    def flush(self) -> None:
        """Bring the losses of the latest steps into the records; called by all ranks at the same step."""
        if self._pending:
            totals = self._accumulator.collect(len(self._pending))
            for row, items in zip(totals, self._pending, strict=True):
                self._records.add_step_losses(row, items)
            self._pending.clear()


def _overrides(component: Any, method: str) -> bool:
    """Return whether a component does anything in a method that its base class leaves empty."""
    own = getattr(type(component), method, None)
    return own is not None and own is not getattr(BaseLossWeighter, method)
