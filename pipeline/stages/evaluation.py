"""The evaluation stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from pipeline.experiment.assembly import Experiment
from pipeline.experiment.records import Records
from pipeline.runtime.processes import Processes
from pipeline.runtime.randomness import key_generators
from pipeline.stages.batches import BatchRunner
from pipeline.stages.gradients import GradientEngine
from pipeline.stages.losses import LossLedger
from pipeline.stages.plan import evaluation_places

_ROUNDS_BETWEEN_QUESTIONS = 16


class EvaluationStage:
    """One pass over the validation splits, each item exactly once at any number of processes."""

    def __init__(
        self,
        experiment: Experiment,
        processes: Processes,
        runner: BatchRunner,
        engine: GradientEngine,
        records: Records,
    ) -> None:
        self._experiment, self._processes, self._runner = experiment, processes, runner
        self._engine, self._records = engine, records
        self._places = evaluation_places(runner.shapes)
        self._ledger = LossLedger(experiment.settings.register_names, len(self._places), processes)

    @property
    def num_rounds(self) -> int:
        """How many times every rank takes a batch."""
        return -(-len(self._places) // self._processes.world_size)

    def run(self, epoch: int, is_asked_to_stop: Callable[[], bool]) -> Iterator[bool]:
        """Yield after each round, False as long as it goes on and True if all ranks agreed to stop instead.

        An evaluation is recorded whole or not at all: stopping one loses nothing but its own time.
        """
        weighter = self._experiment.components.loss_weighter
        seed = self._experiment.settings.training.seed
        key_generators(seed, "before evaluation", epoch)
        weighter.before_eval_epoch(self._records.losses)
        self._engine.buffers.share()
        self._experiment.set_training(False)
        own = list(enumerate(self._places))[self._processes.rank :: self._processes.world_size]
        points = self._runner.points(epoch)
        loading = self._runner.load([place for _, place in own], points)
        for number in range(self.num_rounds):
            if number < len(own):
                position, place = own[number]
                with torch.no_grad():
                    losses = self._runner.losses(
                        next(loading[place.shape.dataset]), place, (*points.batch(place).key, "evaluate")
                    )
                    self._ledger.add(0, position, losses)
            if number % _ROUNDS_BETWEEN_QUESTIONS == 0 and self._processes.any(is_asked_to_stop()):
                self._ledger.collect(1)
                yield True
                return
            yield False
        self._record(epoch)
        key_generators(seed, "after evaluation", epoch)
        weighter.after_eval_epoch(self._records.losses)

    def _record(self, epoch: int) -> None:
        totals = self._ledger.collect(1)[0].tolist()
        feeds = self._experiment.components.module_transforms
        for (register, record), total in zip(self._records.losses["val"].items(), totals, strict=True):
            feeding = [place for place in self._places if register in feeds[place.shape.dataset].loss_registers]
            record.add_epoch(epoch, total, sum(place.num_items for place in feeding))
