"""Find everything that can be known to be wrong before training; writes nothing.

Settings, pymodules, names, parameters and weights are checked together. If they fit, one real batch of each dataset
goes through forward and backward.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pipeline.arguments import RESET, RESUME, Arguments
from pipeline.errors import InvalidExperiment, Problem
from pipeline.experiment.assembly import Experiment, assemble, read_checked_contents
from pipeline.experiment.counting import count
from pipeline.experiment.settings import parse_settings
from pipeline.experiment.user_code import user_problem
from pipeline.experiment.weights import load_initial_weights
from pipeline.machinery import create_module_transforms
from pipeline.paths import ExperimentPaths, data_home
from pipeline.results.settling import finished_lines
from pipeline.results.situation import check_settings_exist, decide, look
from pipeline.runtime.processes import Processes
from pipeline.runtime.terminal import clipped, table
from pipeline.stages.batches import BatchRunner
from pipeline.stages.plan import EpochPoints, Place, StepPlan, evaluation_places
from pipeline.tracking.blocks import first_block, step_lines
from pipeline.tracking.trackers import check_installed

EXAMPLE = "example:\n  python -m pipeline check digits --set data_loading.step_min_items=128"
_SHOWN = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", metavar="EXP", help="an experiment with a settings folder; nothing is written")
    parser.add_argument("--set", action="append", default=[], metavar="FILE.KEY=VALUE", help="change a setting")
    parser.add_argument("--no-batches", action="store_true", help="only check what needs no data")


def execute(arguments: argparse.Namespace) -> int:
    paths = ExperimentPaths(data_home(arguments.data_home), arguments.experiment)
    processes = Processes.join()
    found = look(paths)
    check_settings_exist(paths)
    experiment = _examine(paths, Arguments(paths.name, overrides=tuple(arguments.set)), processes.device)
    plan = StepPlan(BatchRunner(experiment, processes, "train", {}).shapes, experiment.settings.step_min_items)
    state = f"{found.progress or 'damaged'}; this checks the settings folder" if found.exists else "not started"
    for line in first_block(paths, processes, experiment, state):
        print(clipped(line))
    for line in step_lines(len(plan), plan.most_batches, experiment, processes):
        print(clipped(line))
    if not arguments.no_batches:
        _try_batches(experiment, processes)
    print("ok: nothing is known that would keep it from training")
    return 0


def check_before_run(arguments: Arguments) -> bool:
    """Check what a run would find, without data, and tell whether there is anything to run."""
    paths = ExperimentPaths(data_home(arguments.data_home), arguments.experiment)
    found = look(paths)
    if found.is_finished and arguments.mode != RESET:
        print("\n".join(finished_lines(paths)))
        return False
    if decide(arguments, paths, found) != RESUME:
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
class _Trial:
    """How one batch fared."""

    dataset: str
    split: str
    seconds: tuple[float, float, float]
    losses: dict[str, float]

    def row(self) -> tuple[str, ...]:
        times = ("" if not seconds else f"{seconds:.3f} s" for seconds in self.seconds)
        losses = ", ".join(f"{name} {value:.4g}" for name, value in self.losses.items())
        return (self.dataset, self.split, *times, losses)


def _try_batches(experiment: Experiment, processes: Processes) -> None:
    """Run a batch of every split of every dataset, or raise all that went wrong."""
    for _ in count(experiment):
        continue
    transforms = create_module_transforms(experiment, processes.device)
    problems = list[Problem]()
    rows: list[tuple[str, ...]] = [("dataset", "split", "load", "forward", "backward", "losses")]
    for split in ("train", "val"):
        runner = BatchRunner(experiment, processes, split, transforms)
        points = runner.points(1)
        for place in _first_places(runner):
            try:
                trial = _Trying(experiment, runner, points).run(place, split)
                rows.append(trial.row())
                problems += _odd_losses(experiment, trial)
            except (Exception, SystemExit) as error:
                where = str(experiment.folder / "module_transforms" / f"{place.shape.dataset}.py")
                must = f"a {split} batch of {place.shape.dataset} must go through"
                problems.append(user_problem(error, experiment.folder, where, must))
        runner.close()
    print("\n".join(table(rows)))
    if problems:
        raise InvalidExperiment(problems)
    for line in _untouched(experiment):
        print(line)


def _first_places(runner: BatchRunner) -> Iterator[Place]:
    seen = set[str]()
    for place in evaluation_places(runner.shapes):
        if place.shape.dataset not in seen:
            seen.add(place.shape.dataset)
            yield place


class _Trying:
    """Takes one batch the way a stage would."""

    def __init__(self, experiment: Experiment, runner: BatchRunner, points: EpochPoints) -> None:
        self._experiment, self._runner, self._points = experiment, runner, points

    def run(self, place: Place, split: str) -> _Trial:
        is_training = split == "train"
        self._experiment.set_training(is_training)
        began = time.perf_counter()
        batch = next(self._runner.load([place], self._points))
        loaded = time.perf_counter()
        with torch.set_grad_enabled(is_training):
            losses = self._runner.losses(batch, place, (*self._points.batch(place).key, "check"))
        through = time.perf_counter()
        if is_training:
            self._total(losses).backward()
        back = time.perf_counter() - through if is_training else 0.0
        means = {name: float(loss.detach().double().mean()) for name, loss in losses.items()}
        return _Trial(place.shape.dataset, split, (loaded - began, through - loaded, back), means)

    def _total(self, losses: dict[str, torch.Tensor]) -> torch.Tensor:
        optimised = [one.name for one in self._experiment.settings.loss_registers if one.optimize]
        return torch.stack([losses[name].mean() for name in losses if name in optimised]).sum()


def _odd_losses(experiment: Experiment, trial: _Trial) -> Iterator[Problem]:
    optimised = [one.name for one in experiment.settings.loss_registers if one.optimize]
    for name, value in trial.losses.items():
        if name in optimised and not torch.isfinite(torch.tensor(value)):
            where = str(experiment.folder / "module_transforms" / f"{trial.dataset}.py")
            yield Problem(where, f"{name!r} must be finite, but is {value} in the first {trial.split} batch")


def _untouched(experiment: Experiment) -> Iterator[str]:
    """Yield trained parameters that no batch reached: often a module that nobody calls."""
    names = [
        f"{module}.{name}"
        for module, definition in experiment.components.trained_modules.items()
        for name, parameter in definition.named_parameters()
        if parameter.requires_grad and parameter.grad is None
    ]
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        yield f"WARNING: these got no gradient from one batch of each dataset: {', '.join(names[:_SHOWN])}{more}"
