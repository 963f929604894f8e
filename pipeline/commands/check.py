"""Find everything that can be known to be wrong before training; writes nothing.

Settings, pymodules, names, parameters and weights are checked together. If they fit, one real batch of each dataset
goes through forward and backward, and the optimizers take one step.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from pipeline.arguments import RESET, RESUME, Arguments
from pipeline.distributed.processes import Processes
from pipeline.errors import InvalidExperiment, Problem
from pipeline.experiment.assembly import Experiment, assemble, read_checked_contents
from pipeline.experiment.counting import count
from pipeline.experiment.initial_weights import load_initial_weights
from pipeline.experiment.pymodules.user_code import user_problem
from pipeline.experiment.settings.settings import parse_settings
from pipeline.lifecycle.finished import finished_lines
from pipeline.lifecycle.mode import check_settings_exist, choose_action, inspect_results
from pipeline.paths import ExperimentPaths, data_home
from pipeline.session import create_engine, create_module_transforms
from pipeline.system.formatting import clipped, table
from pipeline.tracking.factory import check_installed
from pipeline.tracking.startup_summary import first_block, step_lines
from pipeline.training.batch_runner import BatchRunner, out_of_memory_explained
from pipeline.training.engines.base import BatchLosses, GradientEngine, StepRequests
from pipeline.training.step_plan import BatchAssignment, BatchRef, StepPlan, evaluation_refs

EXAMPLE = "example:\n  python -m pipeline check digits --set data_loading.step_min_items=128"
_SHOWN = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", metavar="EXP", help="an experiment with a settings folder; nothing is written")
    parser.add_argument("--set", action="append", default=[], metavar="FILE.KEY=VALUE", help="change a setting")
    parser.add_argument("--no-batches", action="store_true", help="only check what needs no data")


def execute(arguments: argparse.Namespace) -> int:
    paths = ExperimentPaths(data_home(arguments.data_home), arguments.experiment)
    processes = Processes.join()
    found = inspect_results(paths)
    check_settings_exist(paths)
    experiment = _examine(paths, Arguments(paths.name, overrides=tuple(arguments.set)), processes.device)
    plan = StepPlan(BatchRunner(experiment, processes, "train", {}).shapes, experiment.settings.step_min_items)
    state = f"{found.progress or 'damaged'}; this checks the settings folder" if found.exists else "not started"
    for line in first_block(paths, processes, experiment, state):
        print(clipped(line))
    for line in step_lines(len(plan), plan.max_batches, experiment, processes):
        print(clipped(line))
    if not arguments.no_batches:
        _try_batches(experiment, processes)
    print("ok: no problems found")
    return 0


def check_before_run(arguments: Arguments) -> bool:
    """Check what a run would find, without data, and return whether there is anything to run."""
    paths = ExperimentPaths(data_home(arguments.data_home), arguments.experiment)
    found = inspect_results(paths)
    if found.is_finished and arguments.mode != RESET:
        print("\n".join(finished_lines(paths)))
        return False
    if choose_action(arguments, paths, found) != RESUME:
        check_settings_exist(paths)
        _examine(paths, arguments, torch.device("cpu"))
    return True


def _examine(paths: ExperimentPaths, arguments: Arguments, device: torch.device) -> Experiment:
    # The settings folder is only read.
    sys.dont_write_bytecode = True
    contents = read_checked_contents(paths.settings, arguments.all_overrides)
    settings = parse_settings(contents)
    check_installed(settings.logging, paths.settings / "settings" / "logging.json")
    experiment = assemble(paths.settings / "pymodules", settings, device)
    load_initial_weights(experiment.components, paths, paths.settings / "pymodules")
    return experiment


@dataclass(frozen=True)
class _Result:
    """The losses of one batch, and how long loading, forward and, in training, backward took."""

    dataset: str
    split: str
    seconds: list[float]
    losses: dict[str, float]

    def row(self) -> tuple[str, ...]:
        times = [f"{seconds:.3f} s" for seconds in self.seconds] + [""] * (3 - len(self.seconds))
        losses = ", ".join(f"{name} {value:.4g}" for name, value in self.losses.items())
        return (self.dataset, self.split, *times, losses)


def _try_batches(experiment: Experiment, processes: Processes) -> None:
    """Run a batch of every split of every dataset and one update, or raise all that went wrong.

    The update changes weights of this process only: nothing is saved.
    """
    for _ in count(experiment):
        continue
    transforms = create_module_transforms(experiment, processes.device)
    rows: list[tuple[str, ...]] = [("dataset", "split", "load", "forward", "backward", "losses")]
    problems = list[Problem]()
    trial = _Trial(experiment, processes, transforms)
    for result in (*trial.train(), *trial.evaluate()):
        if isinstance(result, Problem):
            problems.append(result)
        else:
            rows.append(result.row())
            problems += _odd_losses(experiment, result)
    print("\n".join(table(rows)))
    if problems:
        raise InvalidExperiment(problems)
    print(f"update: {', '.join(experiment.optimizers)} took {trial.update_seconds:.3f} s")
    if trial.untouched:
        names = trial.untouched
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        print(f"WARNING: these got no gradient from one batch of each dataset: {', '.join(names[:_SHOWN])}{more}")


class _Trial:
    """Takes one training step, with a batch of every dataset, and evaluates one batch of every dataset."""

    def __init__(self, experiment: Experiment, processes: Processes, transforms: dict[str, Any]) -> None:
        self._experiment = experiment
        self._processes = processes
        self._transforms = transforms
        self._optimised = {one.name for one in experiment.settings.loss_registers if one.optimize}
        self.update_seconds = 0.0
        self.untouched: list[str] = []

    def train(self) -> Iterator[_Result | Problem]:
        experiment = self._experiment
        engine = create_engine(experiment, self._processes)
        engine.prepare()
        experiment.set_training(True)
        runner = BatchRunner(experiment, self._processes, "train", self._transforms)
        refs = list(_first_places(runner))
        touched: set[int] = set()
        hooks = [
            parameter.register_post_accumulate_grad_hook(lambda one: touched.add(id(one)))
            for _, parameter in self._trained_parameters()
        ]
        engine.begin_step(len(refs))
        is_complete = True
        for position, ref in enumerate(refs):
            result = self._try_batch(runner, ref, "train", engine, position, is_last=ref is refs[-1])
            is_complete = is_complete and not isinstance(result, Problem)
            yield result
        for hook in hooks:
            hook.remove()
        runner.close()
        self.untouched = [name for name, parameter in self._trained_parameters() if id(parameter) not in touched]
        if is_complete:
            began = time.perf_counter()
            try:
                engine.finish_step((experiment.settings.training.seed, "check"))
            except (Exception, SystemExit) as error:
                where = str(experiment.folder / "optim_sched")
                yield user_problem(error, experiment.folder, where, "an update must work")
            self.update_seconds = time.perf_counter() - began

    def _trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for module_name, module in self._experiment.components.trained_modules.items():
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    yield f"{module_name}.{name}", parameter

    def evaluate(self) -> Iterator[_Result | Problem]:
        self._experiment.set_training(False)
        runner = BatchRunner(self._experiment, self._processes, "val", self._transforms)
        with torch.no_grad():
            for ref in _first_places(runner):
                yield self._try_batch(runner, ref, "val")
        runner.close()

    def _try_batch(
        self,
        runner: BatchRunner,
        ref: BatchRef,
        split: str,
        engine: GradientEngine | None = None,
        position: int = 0,
        *,
        is_last: bool = False,
    ) -> _Result | Problem:
        points = runner.points(1)
        dataset = ref.shape.dataset
        times = [time.perf_counter()]
        means: dict[str, float] = {}

        def compute() -> BatchLosses:
            losses = runner.losses(batch, ref, (*points.batch(ref).key, "check"))
            means.update({name: float(loss.detach().double().mean()) for name, loss in losses.items()})
            times.append(time.perf_counter())
            optimised = [loss for name, loss in losses.items() if name in self._optimised]
            sums = [loss.detach().sum(dtype=torch.float64) for loss in optimised]
            return BatchLosses(optimised, [1 / ref.num_items] * len(optimised), sums)

        try:
            batch = next(runner.load([ref], points))
            times.append(time.perf_counter())
            with out_of_memory_explained(batch, ref, self._processes.device):
                if engine is None:
                    compute()
                else:
                    engine.backward(BatchAssignment(position, ref), compute, StepRequests() if is_last else None)
                    times.append(time.perf_counter())
        except (Exception, SystemExit) as error:
            where = str(self._experiment.folder / "module_transforms" / f"{dataset}.py")
            must = f"a {split} batch of {dataset} must go through"
            return user_problem(error, self._experiment.folder, where, must)
        return _Result(dataset, split, [after - before for before, after in pairwise(times)], means)


def _first_places(runner: BatchRunner) -> Iterator[BatchRef]:
    seen = set[str]()
    for ref in evaluation_refs(runner.shapes):
        if ref.shape.dataset not in seen:
            seen.add(ref.shape.dataset)
            yield ref


def _odd_losses(experiment: Experiment, result: _Result) -> Iterator[Problem]:
    optimised = [one.name for one in experiment.settings.loss_registers if one.optimize]
    for name, value in result.losses.items():
        if name in optimised and not torch.isfinite(torch.tensor(value)):
            where = str(experiment.folder / "module_transforms" / f"{result.dataset}.py")
            yield Problem(where, f"{name!r} must be finite, but is {value} in the first {result.split} batch")
