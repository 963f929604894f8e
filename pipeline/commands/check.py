"""Find everything that can be known to be wrong before training; writes nothing.

Settings, pymodules, names, parameters and weights are checked together. If they fit, one real batch of each dataset
goes through forward and backward, and the optimizers take one step.
"""

from __future__ import annotations

import argparse
import sys

import torch

from pipeline.arguments import RESET, RESUME, Arguments, add_set_option
from pipeline.distributed.processes import Processes
from pipeline.errors import InvalidExperiment, Problem
from pipeline.evaluation.trial import Trial, TriedBatch
from pipeline.experiment.assembly import Experiment, assemble, assumed_settings, count, read_checked_contents
from pipeline.experiment.checks.parameter_uses import doubtful_parameters
from pipeline.experiment.initial_weights import load_initial_weights
from pipeline.experiment.settings.settings import parse_settings
from pipeline.lifecycle.finished import finished_lines
from pipeline.lifecycle.mode import check_settings_exist, choose_action, inspect_results
from pipeline.paths import ExperimentPaths, data_home
from pipeline.system.formatting import clipped, folded, shown_bytes, table
from pipeline.tracking.factory import check_installed
from pipeline.tracking.startup_summary import WARNING_MARK, first_block, step_lines
from pipeline.training.batch_runner import BatchRunner
from pipeline.training.step_plan import StepPlan, create_plan

EXAMPLE = "example:\n  training-pipeline check digits --set data_loading.step_min_items=128"
_MAX_SHOWN_NAMES = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", metavar="EXP", help="an experiment with a settings folder; nothing is written")
    add_set_option(parser)
    parser.add_argument("--explain", action="store_true", help="list what is assumed for all that was left out")
    parser.add_argument("--no-batches", action="store_true", help="only check what needs no data")


def execute(arguments: argparse.Namespace) -> int:
    paths = ExperimentPaths(data_home(arguments.data_home), arguments.experiment)
    processes = Processes.join()
    situation = inspect_results(paths)
    check_settings_exist(paths)
    overrides = tuple(arguments.set)
    experiment = _examine(paths, Arguments(paths.name, overrides=overrides), processes.device)
    shapes = BatchRunner(experiment, processes, "train").shapes
    plan = create_plan(shapes, experiment.settings, experiment.max_steps)
    state = "not started"
    if situation.exists:
        # A resume would use the frozen copy, which is not what is checked here.
        state = f"{situation.progress or 'damaged'}; this checks the settings folder"
    for line in first_block(paths, processes, experiment, state):
        print(clipped(line))
    for line in step_lines(plan, experiment, processes):
        print(clipped(line))
    if arguments.explain:
        for assumption in (*assumed_settings(paths.settings, overrides), *experiment.assumptions):
            print(folded(f"assumed: {assumption}"))
    if not arguments.no_batches:
        _try_batches(experiment, processes, plan)
    if (
        len(experiment.settings.loss_registers) > 1
        and not (paths.settings / "settings" / "loss_registers.json").exists()
    ):
        names = ", ".join(experiment.settings.register_names)
        what = f"without settings/loss_registers.json all of {names} are minimised"
        print(f'{WARNING_MARK}{what}; list what is only to be recorded there, with "optimize": false')
    for problem in doubtful_parameters(paths.settings / "pymodules", experiment.settings.parameters):
        print(f"{WARNING_MARK}{problem}")
    print("ok: no problems found")
    return 0


def check_before_run(arguments: Arguments) -> bool:
    """Check what a run would find, without data, and return whether there is anything to run."""
    paths = arguments.paths
    situation = inspect_results(paths)
    if situation.is_finished and arguments.mode != RESET:
        print("\n".join(finished_lines(paths)))
        return False
    if choose_action(arguments, paths, situation) != RESUME:
        check_settings_exist(paths)
        # On the CPU: the processes of the run, which are still to be started, need the devices for themselves.
        _examine(paths, arguments, torch.device("cpu"))
    return True


def _examine(paths: ExperimentPaths, arguments: Arguments, device: torch.device) -> Experiment:
    """Return the experiment as a run would assemble it, or raise all problems of a kind together."""
    # The settings folder is only read.
    sys.dont_write_bytecode = True
    contents = read_checked_contents(paths.settings, arguments.all_overrides)
    settings = parse_settings(contents)
    check_installed(settings.logging, paths.settings / "settings" / "logging.json")
    experiment = assemble(paths.settings / "pymodules", settings, device)
    load_initial_weights(experiment.components, paths, paths.settings / "pymodules", settings.training)
    return experiment


def _try_batches(experiment: Experiment, processes: Processes, plan: StepPlan) -> None:
    """Run a batch of every split of every dataset and one update, or raise all that went wrong."""
    # Module transforms get the counters, which must have counted by then.
    for _ in count(experiment):
        continue
    trial = Trial(experiment, processes)
    transforms = experiment.components.module_transforms.values()
    # What the rows of a step need is a column only where a loss couples them.
    has_rows = any(definition.is_whole_step for definition in transforms)
    header = ("dataset", "split", "load", "forward", "backward", *(["rows of a step"] if has_rows else []), "losses")
    rows: list[tuple[str, ...]] = [header]
    problems: list[Problem] = []
    for result in trial.run():
        if isinstance(result, Problem):
            problems.append(result)
        else:
            # An evaluation has no backward pass.
            times = [f"{seconds:.3f} s" for seconds in result.seconds] + [""] * (3 - len(result.seconds))
            losses = ", ".join(f"{name} {value:.4g}" for name, value in result.losses.items())
            held = [_describe_rows(plan, result)] if has_rows else []
            rows.append((result.dataset, result.split, *times, *held, losses))
    if len(rows) > 1:
        print("\n".join(table(rows)))
    if problems:
        raise InvalidExperiment(problems)
    print(f"update: {', '.join(experiment.optimizers)} took {trial.update_seconds:.3f} s")
    if trial.untouched:
        names = trial.untouched
        more = f" and {len(names) - _MAX_SHOWN_NAMES} more" if len(names) > _MAX_SHOWN_NAMES else ""
        listed = ", ".join(names[:_MAX_SHOWN_NAMES])
        print(f"{WARNING_MARK}these got no gradient from one batch of each dataset: {listed}{more}")


def _describe_rows(plan: StepPlan, result: TriedBatch) -> str:
    """Return how many rows of a dataset a step couples at most, and what they take on every process."""
    if not result.row_bytes:
        return ""
    num_rows = max(
        sum(ref.num_items for ref in step if ref.shape.dataset == result.dataset) for step in plan.different_steps()
    )
    return f"{num_rows} × {shown_bytes(result.row_bytes)} = {shown_bytes(num_rows * result.row_bytes)}"
