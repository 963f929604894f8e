"""Optimizers and schedulers, made by the functions of the author's files."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch
from torch.optim import Optimizer

from pipeline.components import BaseScheduler
from pipeline.errors import Problem
from pipeline.experiment.pymodules.assumptions import Assumption
from pipeline.experiment.pymodules.contract_examples import required_methods
from pipeline.experiment.pymodules.contracts import takes
from pipeline.experiment.pymodules.definitions import Components
from pipeline.experiment.pymodules.user_code import place_of, user_problem
from pipeline.experiment.settings.settings import Settings
from pipeline.system.accelerators import has_fused_kernels

# Not SGD: its kernel fails at sparse gradients, and at a momentum that begins later than others.
_FUSED = (torch.optim.Adam, torch.optim.AdamW)


def create_optimizers(
    components: Components, settings: Settings, folder: Path, problems: list[Problem]
) -> dict[str, Optimizer]:
    """Return the optimizers that can be created, and add what is wrong with the others to ``problems``."""
    optimizers: dict[str, Optimizer] = {}
    # Averages are computed, so code that optimises all modules need not leave them out.
    without_averages = {
        name: module for name, module in components.all_modules.items() if name not in components.averages
    }
    for name, definition in components.optim_sched.items():
        where = str(folder / "optim_sched" / f"{name}.py")
        try:
            optimizer = definition.create_optimizer(without_averages)
        except (Exception, SystemExit) as error:
            problem = user_problem(error, folder, where, "create_optimizer must work")
            # Not its subclasses: a missing parameter says by itself what there is.
            if type(error) is KeyError:
                problem = replace(problem, fix=f"the modules are {', '.join(without_averages)}")
            problems.append(problem)
            continue
        if not isinstance(optimizer, Optimizer):
            what = f"create_optimizer must return a torch optimizer, but returns {type(optimizer).__name__}"
            problems.append(Problem(where, what))
            continue
        _prefer_fused(optimizer)
        optimizers[name] = optimizer
    return optimizers


def scale_rates(optimizers: dict[str, Optimizer], settings: Settings) -> None:
    """Apply ``lr_scaling``, before the schedulers are created, which take the rates that they find as their base."""
    scaling = settings.training.lr_scaling
    if scaling is None:
        return
    ratio = settings.step_min_items / scaling.base_items
    factor = math.sqrt(ratio) if scaling.rule == "sqrt" else ratio
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] *= factor


def name_groups(optimizers: dict[str, Optimizer]) -> list[Assumption]:
    """Give a name to every param group that has none; return what was given."""
    assumptions = []
    for name, optimizer in optimizers.items():
        unnamed = [index for index, group in enumerate(optimizer.param_groups) if "name" not in group]
        for index in unnamed:
            optimizer.param_groups[index]["name"] = f"group_{index}"
        if unnamed:
            what = f"names of param groups: {', '.join(f'group_{index}' for index in unnamed)}"
            assumptions.append(Assumption(f"pymodules/optim_sched/{name}.py", what))
    return assumptions


def _prefer_fused(optimizer: Optimizer) -> None:
    """Use torch's fused kernels where the author has not chosen otherwise: the same update in one pass."""
    # A subclass may change what a step does.
    if type(optimizer) not in _FUSED:
        return
    for group in optimizer.param_groups:
        is_undecided = all(group.get(key) is None for key in ("fused", "foreach"))
        # These are choices of the author, too.
        is_special = group.get("capturable") or group.get("differentiable")
        is_supported = all(
            parameter.is_floating_point() and has_fused_kernels(parameter.device) for parameter in group["params"]
        )
        if is_undecided and not is_special and is_supported:
            group["fused"] = True


def create_schedulers(
    components: Components, optimizers: dict[str, Optimizer], folder: Path, problems: list[Problem]
) -> dict[str, BaseScheduler]:
    """Return the schedulers that can be created, and add what is wrong with the others to ``problems``."""
    schedulers: dict[str, BaseScheduler] = {}
    for name, optimizer in optimizers.items():
        where = str(folder / "optim_sched" / f"{name}.py")
        try:
            schedulers[name] = components.optim_sched[name].create_scheduler(optimizer)
        except (Exception, SystemExit) as error:
            problems.append(user_problem(error, folder, where, "create_scheduler must work"))
            continue
        for method in required_methods("scheduler"):
            if not callable(getattr(schedulers[name], method, None)):
                what = f"create_scheduler must return an object with a method {method}"
                kind = type(schedulers[name]).__name__
                fix = f"return TorchScheduler({kind}(…)) for a scheduler of torch's, from pipeline.components"
                if kind == "ReduceLROnPlateau":
                    fix = 'return TorchScheduler(ReduceLROnPlateau(…), register="loss"), with a register of evaluations'
                problems.append(Problem(place_of(Path(where), "create_scheduler"), what, fix))
                # One of torch's own schedulers lacks several: one message is enough.
                break
        after_evaluation = getattr(schedulers[name], "after_evaluation", None)
        if after_evaluation is not None and not takes(after_evaluation, 1):
            what = "after_evaluation of a scheduler must take one argument: after_evaluation(losses)"
            problems.append(Problem(place_of(Path(where), "create_scheduler"), what))
    return schedulers
