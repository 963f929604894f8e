"""Assembly: from files to an experiment whose parts fit together, before anything is written."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pipeline.errors import InvalidExperiment, Problem
from pipeline.experiment.checks import (
    Splits,
    name_problems,
    optimizer_problems,
    parameter_problems,
    read_splits,
    sparse_problems,
    sync_batchnorm_problems,
    unevaluated_registers,
)
from pipeline.experiment.compilation import compile_module
from pipeline.experiment.pymodules.contracts import ContractReader
from pipeline.experiment.pymodules.definitions import Components
from pipeline.experiment.pymodules.loader import PymoduleLoader
from pipeline.experiment.pymodules.user_code import user_problem
from pipeline.experiment.settings.settings import Contents, Settings, parse_settings, read_contents, readable_contents
from pipeline.experiment.sharding import DeviceMesh, shard_module, sharding_problems
from pipeline.system.accelerators import CPU, has_fused_kernels
from pipeline.system.seeding import seed_generators

# Not SGD: its kernel fails at sparse gradients, and at a momentum that begins later than others.
_FUSED = (torch.optim.Adam, torch.optim.AdamW)
_NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Experiment:
    """An experiment that can run: its settings, its components and the optimizers over its modules."""

    settings: Settings
    components: Components
    splits: Splits
    optimizers: dict[str, Optimizer]
    schedulers: dict[str, Any]
    device: torch.device
    folder: Path
    is_sharded: bool = False

    @property
    def runs_in_rounds(self) -> bool:
        """Modules that communicate in a forward pass need every rank to run the same dataset at the same time."""
        return self.is_sharded or self.settings.training.sync_batchnorm

    def set_training(self, training: bool) -> None:
        """Switch the trained modules; frozen ones stay in evaluation mode for ever."""
        for module in self.components.trained_modules.values():
            module.train(training)

    def initialize_schedulers(self) -> None:
        """Give each scheduler its first epoch; called once in the life of an experiment."""
        for name, scheduler in self.schedulers.items():
            scheduler.initialize(self.components.optim_sched[name].scheduler_start_epoch)

    def learning_rates(self) -> dict[str, dict[str, float]]:
        """Return the rates in force, by optimizer and param group."""
        return {
            name: {group["name"]: float(group["lr"]) for group in optimizer.param_groups}
            for name, optimizer in self.optimizers.items()
        }


def assemble(
    folder: Path, settings: Settings, device: torch.device, mesh: DeviceMesh | None = None, world_size: int = 1
) -> Experiment:
    """Load the pymodules below ``folder`` and put the experiment together, or raise every problem found.

    With a ``mesh``, modules are spread over its processes.
    """
    experiment, problems = _assemble(folder, settings, device, mesh, world_size)
    _raise(problems)
    seed_generators(settings.training.seed, "assembled")
    return experiment


def _assemble(
    folder: Path,
    settings: Settings,
    device: torch.device,
    mesh: DeviceMesh | None,
    world_size: int,
    unknown: frozenset[str] = _NOTHING,
) -> tuple[Experiment, list[Problem]]:
    """Return an experiment, and everything that is wrong with it; it can be used if nothing is.

    What depends on something that is wrong is not judged. ``unknown`` names settings files that could not be read.
    """
    components, problems, failed = _read_components(folder, settings, unknown)
    splits: Splits = {}
    if "datasets" not in failed:
        splits, found = read_splits(components, folder)
        problems += found
        if not found and not failed & {"module_transforms", "loss_registers"}:
            problems += unevaluated_registers(components, settings, splits, folder)
    optimizers: dict[str, Optimizer] = {}
    schedulers: dict[str, Any] = {}
    if "modules" not in failed:
        unfit = [
            *sharding_problems(components, settings.training, folder),
            *sparse_problems(components, settings, folder, world_size),
        ]
        if settings.training.sync_batchnorm:
            unfit += sync_batchnorm_problems(device)
        problems += unfit
        if not unfit and "optim_sched" not in failed:
            _place_modules(components, device, mesh)
            if settings.training.sync_batchnorm:
                _synchronise_batchnorm(components)
            optimizers = _create_optimizers(components, folder, problems)
            problems += optimizer_problems(optimizers, folder)
            if len(optimizers) == len(components.optim_sched):
                problems += parameter_problems(components, optimizers, folder)
            _scale_learning_rates(optimizers, settings)
            schedulers = _create_schedulers(components, optimizers, folder, problems)
    experiment = Experiment(settings, components, splits, optimizers, schedulers, device, folder, mesh is not None)
    return experiment, list(dict.fromkeys(problems))


def assemble_for_evaluation(
    folder: Path, settings: Settings, device: torch.device, split: str, mesh: DeviceMesh | None = None
) -> Experiment:
    """Put together what the evaluation of one split needs: no optimizers, and no other split."""
    components, problems, failed = _read_components(folder, settings)
    splits: Splits = {}
    if "datasets" not in failed:
        splits, found = read_splits(components, folder, [split])
        problems += found
    _raise(problems)
    _place_modules(components, device, mesh)
    return Experiment(settings, components, splits, {}, {}, device, folder, mesh is not None)


def read_checked_contents(folder: Path, overrides: tuple[str, ...] = ()) -> Contents:
    """Read the settings of an experiment's folder; if they are wrong, say what is wrong with its pymodules as well."""
    try:
        return read_contents(folder / "settings", overrides)
    except InvalidExperiment as error:
        contents, unknown = readable_contents(folder / "settings")
        settings = parse_settings(contents)
        # Whether the device can synchronise BatchNorm is asked when the settings are right.
        settings = replace(settings, training=replace(settings.training, sync_batchnorm=False))
        _, found = _assemble(folder / "pymodules", settings, CPU, None, 1, unknown)
        if not found:
            raise
        raise InvalidExperiment([*error.problems, *found]) from error


def _read_components(
    folder: Path, settings: Settings, unknown: frozenset[str] = _NOTHING
) -> tuple[Components, list[Problem], set[str]]:
    """Return the components, what is wrong with them, and the families and settings files it is wrong in."""
    loader = PymoduleLoader(folder, settings.training.seed)
    reader = ContractReader(loader.load())
    components = reader.read()
    misfits = name_problems(components, settings, folder, loader.failed_families | unknown)
    failed = loader.failed_families | reader.failed_families | unknown
    return components, [*loader.problems, *reader.problems, *misfits], failed


def _raise(problems: list[Problem]) -> None:
    if problems:
        raise InvalidExperiment(problems)


def _place_modules(components: Components, device: torch.device, mesh: DeviceMesh | None) -> None:
    for name, definition in components.modules.items():
        definition.module.to(device)
        if definition.frozen:
            definition.module.requires_grad_(False).eval()
        if definition.compile:
            compile_module(definition.module, name)
        if mesh is not None:
            shard_module(definition, mesh)


def _synchronise_batchnorm(components: Components) -> None:
    """SyncBatchNorm replaces layers inside a module, so the module itself must not be one."""
    for module in components.trained_modules.values():
        nn.SyncBatchNorm.convert_sync_batchnorm(module)


def _create_optimizers(components: Components, folder: Path, problems: list[Problem]) -> dict[str, Optimizer]:
    """Return the optimizers that can be created, and add what is wrong with the others to ``problems``."""
    optimizers: dict[str, Optimizer] = {}
    for name, definition in components.optim_sched.items():
        where = folder / "optim_sched" / f"{name}.py"
        try:
            optimizer = definition.create_optimizer(components.all_modules)
        except (Exception, SystemExit) as error:
            problem = user_problem(error, folder, str(where), "create_optimizer must work")
            if isinstance(error, KeyError):
                problem = replace(problem, fix=f"the modules are {', '.join(components.all_modules)}")
            problems.append(problem)
            continue
        if not isinstance(optimizer, Optimizer):
            what = f"create_optimizer must return a torch optimizer, but returns {type(optimizer).__name__}"
            problems.append(Problem(str(where), what))
            continue
        _prefer_fused(optimizer)
        optimizers[name] = optimizer
    return optimizers


def _prefer_fused(optimizer: Optimizer) -> None:
    """Use torch's fused kernels where the author has not chosen otherwise: the same update in one pass."""
    for group in optimizer.param_groups if type(optimizer) in _FUSED else ():
        has_choice = group.get("foreach") is None and not (group.get("capturable") or group.get("differentiable"))
        is_usual = all(one.is_floating_point() and has_fused_kernels(one.device) for one in group["params"])
        if group.get("fused") is None and has_choice and is_usual:
            group["fused"] = True


def _scale_learning_rates(optimizers: dict[str, Optimizer], settings: Settings) -> None:
    scaling = settings.training.lr_scaling
    if scaling is None:
        return
    factor = settings.step_min_items / scaling.base_items
    factor = math.sqrt(factor) if scaling.rule == "sqrt" else factor
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] *= factor


def _create_schedulers(
    components: Components, optimizers: dict[str, Optimizer], folder: Path, problems: list[Problem]
) -> dict[str, Any]:
    """Return the schedulers that can be created, and add what is wrong with the others to ``problems``."""
    schedulers = {}
    for name, optimizer in optimizers.items():
        where = str(folder / "optim_sched" / f"{name}.py")
        try:
            schedulers[name] = components.optim_sched[name].create_scheduler(optimizer)
        except (Exception, SystemExit) as error:
            problems.append(user_problem(error, folder, where, "create_scheduler must work"))
            continue
        for method in ("initialize", "before_train_epoch", "after_train_step", "after_train_epoch", "save", "load"):
            if not callable(getattr(schedulers[name], method, None)):
                what = f"create_scheduler must return an object with a method {method}; TorchScheduler wraps torch's"
                problems.append(Problem(where, what))
                break
    return schedulers
