"""One training step and one evaluation on real batches, to find what fails before a run is started."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from pipeline.components import Position
from pipeline.components.losses import mean
from pipeline.distributed.processes import Processes
from pipeline.errors import Problem
from pipeline.evaluation.batch_failures import explain_failure
from pipeline.experiment.assembly import Experiment
from pipeline.experiment.pymodules.user_code import user_problem
from pipeline.experiment.turns import Turn, TurnPlan
from pipeline.training.averages import Averages
from pipeline.training.batch_runner import BatchRunner, Key, out_of_memory_explained
from pipeline.training.engines.base import GradientEngine
from pipeline.training.engines.create import create_engine
from pipeline.training.loaders import Batch, LoadedBatch
from pipeline.training.losses import Items
from pipeline.training.metrics import MetricAccumulator
from pipeline.training.step import BatchLosses, StepRequests
from pipeline.training.step_plan import BatchAssignment, BatchRef, evaluation_refs


@dataclass(frozen=True)
class TriedBatch:
    """The mean losses of one batch, and the seconds that loading, forward and, in training, backward took."""

    dataset: str
    split: str
    seconds: list[float]
    losses: dict[str, float]
    items: Items
    # Of a row, in training, if the loss couples the rows of a step.
    row_bytes: int = 0


class Trial:
    """Takes one training step, with a batch of every dataset, and evaluates one batch of every dataset.

    The update changes the weights of this process only: nothing is saved. Data counters must have counted before.
    """

    def __init__(self, experiment: Experiment, processes: Processes) -> None:
        self._experiment = experiment
        self._processes = processes
        experiment.create_module_transforms()
        # They begin as copies of the weights that training begins with.
        Averages(experiment)
        self._optimised = {register.name for register in experiment.settings.loss_registers if register.optimize}
        self._failures: set[tuple[str, type[BaseException], str]] = set()
        self.update_seconds = 0.0
        # Trained parameters that got no gradient; known once the training step was tried.
        self.untouched: list[str] = []

    def run(self) -> Iterator[TriedBatch | Problem]:
        """Yield each batch that went through, and what went wrong with others, with their losses and in the update."""
        for result in (*self._train(), *self._evaluate()):
            if result is None:
                continue
            yield result
            if isinstance(result, Problem):
                continue
            for name, value in result.losses.items():
                # A batch without items of a register has no mean.
                if name in self._optimised and result.items[name] and not math.isfinite(value):
                    where = str(self._experiment.folder / "module_transforms" / f"{result.dataset}.py")
                    what = f"{name!r} must be finite, but is {value} in the first {result.split} batch"
                    yield Problem(where, what)

    def _train(self) -> Iterator[TriedBatch | Problem | None]:
        experiment = self._experiment
        engine = create_engine(experiment, self._processes)
        engine.prepare()
        experiment.set_training(True)
        runner = BatchRunner(experiment, self._processes, "train")
        runner.position = Position(1, 1, 1)
        refs = list(_first_batches(runner))
        touched: set[int] = set()

        def note_gradient(parameter: torch.Tensor) -> None:
            touched.add(id(parameter))

        # A hook sees a gradient when it is added, whatever the engine does with it until the step ends.
        parameters = dict(self._trained_parameters())
        hooks = [parameter.register_post_accumulate_grad_hook(note_gradient) for parameter in parameters.values()]
        turns = TurnPlan(experiment.components.optim_sched, experiment.settings)
        for number, turn in enumerate(turns.different_turns()):
            engine.begin_step(len(refs), turn)
            runner.position = Position(1, 1, 1, turn.number)
            is_complete = True
            for position, ref in enumerate(refs):
                result = self._try_batch(runner, ref, "train", engine, position, turn, is_last=ref is refs[-1])
                is_complete = is_complete and isinstance(result, TriedBatch)
                # Each batch is shown once.
                if number == 0 or isinstance(result, Problem):
                    yield result
            # The update needs the gradients of all batches.
            if not is_complete:
                break
            began = time.perf_counter()
            try:
                engine.finish_step((experiment.settings.training.seed, "check"))
            except (Exception, SystemExit) as error:
                where = str(experiment.folder / "optim_sched")
                yield user_problem(error, experiment.folder, where, "an update must work")
            self.update_seconds = time.perf_counter() - began
        for hook in hooks:
            hook.remove()
        runner.close()
        self.untouched = [name for name, parameter in parameters.items() if id(parameter) not in touched]

    def _trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for module_name, module in self._experiment.components.trained_modules.items():
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    yield f"{module_name}.{name}", parameter

    def _evaluate(self) -> Iterator[TriedBatch | Problem | None]:
        self._experiment.set_training(False)
        runner = BatchRunner(self._experiment, self._processes, "val")
        with torch.no_grad():
            for ref in _first_batches(runner):
                yield self._try_batch(runner, ref, "val")
        runner.close()

    def _try_batch(
        self,
        runner: BatchRunner,
        ref: BatchRef,
        split: str,
        engine: GradientEngine | None = None,
        position: int = 0,
        turn: Turn | None = None,
        *,
        is_last: bool = False,
    ) -> TriedBatch | Problem | None:
        """Return how a batch went; None if it failed as one before it did."""
        points = runner.points(1)
        dataset = ref.shape.dataset
        times = [time.perf_counter()]
        batch: Batch = None
        row_bytes = 0
        try:
            loaded = next(runner.load([ref], points))
            batch = loaded.batch
            times.append(time.perf_counter())
            with out_of_memory_explained(batch, ref, self._processes.device):
                items = runner.check_items(loaded, ref)
                losses, means = self._run(runner, loaded, ref, items, (*points.batch(ref).key, "check"), split, turn)
                times.append(time.perf_counter())
                if engine is not None:
                    # The requests travel with the last batch, in which the engine reduces the gradients.
                    requests = StepRequests() if is_last else None
                    engine.add_batch(BatchAssignment(position, ref), self._followed(losses, items, turn), requests)
                    times.append(time.perf_counter())
                    if self._experiment.components.module_transforms[dataset].is_whole_step:
                        row_bytes = runner.check_rows(loaded, ref, (*points.batch(ref).key, "check"))
        # An author's code may also call sys.exit; the other datasets are tried all the same.
        except (Exception, SystemExit) as error:
            failure = (dataset, type(error), str(error))
            if failure in self._failures:
                # A validation batch has met what a training batch met before.
                return None
            self._failures.add(failure)
            return explain_failure(error, self._experiment, dataset, split, batch)
        seconds = [after - before for before, after in pairwise(times)]
        return TriedBatch(dataset, split, seconds, means, items, row_bytes)

    def _run(
        self,
        runner: BatchRunner,
        loaded: LoadedBatch,
        ref: BatchRef,
        items: Items,
        key: Key,
        split: str,
        turn: Turn | None,
    ) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """Return the losses of a batch, and what there is to show of it: their means and, evaluated, its metrics."""
        values: dict[str, float] = {}
        if split == "train":
            losses = runner.losses(loaded, ref, items, key, turn.needed if turn else None)
        else:
            metrics = MetricAccumulator(self._experiment.components.metrics, self._experiment.folder, self._processes)
            losses, arguments = runner.evaluate(loaded, ref, items, key)
            metrics.add(0, arguments)
            values = {name: value for name, value in metrics.collect().items() if not math.isnan(value)}
        runner.check_ignored(loaded, ref, losses, items)
        means = {name: mean(float(loss.detach().double().sum()), items[name]) for name, loss in losses.items()}
        return losses, means | values

    def _followed(self, losses: dict[str, torch.Tensor], items: Items, turn: Turn | None) -> BatchLosses:
        """Return the losses that an optimizer follows, as a step would have them."""
        needed = self._optimised if turn is None else turn.needed
        followed = {name: loss for name, loss in losses.items() if name in needed}
        return BatchLosses(
            followed,
            {name: 1 / max(1, items[name]) for name in followed},
            {name: loss.detach().sum(dtype=torch.float64) for name, loss in followed.items()},
        )


def _first_batches(runner: BatchRunner) -> Iterator[BatchRef]:
    """Yield the first batch of every dataset."""
    seen = set[str]()
    for ref in evaluation_refs(runner.shapes):
        if ref.shape.dataset not in seen:
            seen.add(ref.shape.dataset)
            yield ref
