"""Assembly: from files to an experiment whose parts fit together, before anything is written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from pipeline.components import BaseModuleTransform, BaseScheduler
from pipeline.errors import InvalidExperiment, PipelineError, Problem
from pipeline.experiment.checks.data import Splits, read_splits, unevaluated_registers
from pipeline.experiment.checks.hooks import unfreezing_problems
from pipeline.experiment.checks.names import name_problems, scheduler_problems
from pipeline.experiment.checks.parameters import (
    optimizer_problems,
    parameter_problems,
    sharding_problems,
    sparse_problems,
    sync_batchnorm_problems,
)
from pipeline.experiment.compilation import compile_module
from pipeline.experiment.constant_parameters import saving_problems
from pipeline.experiment.optimizers import create_optimizers, create_schedulers, name_groups, scale_rates
from pipeline.experiment.pymodules.assumptions import Assumption
from pipeline.experiment.pymodules.contracts import ContractReader
from pipeline.experiment.pymodules.definitions import Components, MetricDefinition, ModuleDefinition
from pipeline.experiment.pymodules.loader import PymoduleLoader
from pipeline.experiment.pymodules.user_code import user_problem
from pipeline.experiment.settings.parameters import PARAMETERS
from pipeline.experiment.settings.settings import (
    Contents,
    LossRegister,
    Settings,
    fill_in,
    parse_settings,
    read_contents,
    readable_contents,
)
from pipeline.experiment.sharding import shard_module
from pipeline.system.accelerators import CPU
from pipeline.system.formatting import flat, shown_parameters
from pipeline.system.logging import LOGGER
from pipeline.system.seeding import seed_generators

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_NO_NAMES: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Experiment:
    """An experiment that can run: its settings, its components and the optimizers over its modules."""

    settings: Settings
    components: Components
    splits: Splits
    optimizers: dict[str, Optimizer]
    schedulers: dict[str, BaseScheduler]
    device: torch.device
    folder: Path
    is_sharded: bool = False
    # What stands for files and names that the author has left out.
    assumptions: tuple[Assumption, ...] = ()
    # All that changes later: a module transform may ask what the data counters have counted, so it is created then.
    module_transforms: dict[str, BaseModuleTransform] = field(default_factory=dict)

    @property
    def runs_in_rounds(self) -> bool:
        """Modules that communicate in a forward pass need every rank to run the same dataset at the same time."""
        return self.is_sharded or self.settings.training.sync_batchnorm

    @property
    def max_steps(self) -> int | None:
        """The last step of all, as the early stopper or the settings say."""
        limits = (getattr(self.components.early_stopper, "max_steps", None), self.settings.training.max_steps)
        return min((limit for limit in limits if limit is not None), default=None)

    def set_training(self, training: bool) -> None:
        """Set the mode of the trained modules; frozen ones always stay in evaluation mode."""
        for module in self.components.trained_modules.values():
            module.train(training)

    def create_module_transforms(self) -> None:
        """Create the module transform of every dataset, once the data counters have counted or were restored."""
        counters = {name: entry.counter for name, entry in self.components.data_counters.items()}
        seed_generators(self.settings.training.seed, "module transforms")
        for name, definition in self.components.module_transforms.items():
            # A dict of its own for each: an author's code may change it.
            self.module_transforms[name] = definition.create(dict(counters), self.device, LOGGER)

    def initialize_schedulers(self) -> None:
        """Give each scheduler its first epoch; called once in the life of an experiment, not at a resume."""
        for name, scheduler in self.schedulers.items():
            scheduler.initialize(self.components.optim_sched[name].scheduler_start_epoch)

    def learning_rates(self) -> dict[str, dict[str, float]]:
        """Return the current learning rates, by optimizer and param group."""
        return {
            name: {group["name"]: float(group["lr"]) for group in optimizer.param_groups}
            for name, optimizer in self.optimizers.items()
        }


def count(experiment: Experiment) -> Iterator[None]:
    """Show every data counter the metadata of every training point of its datasets, once.

    A generator with a turn per point, so that the caller can answer other ranks in between.
    """
    for name, entry in experiment.components.data_counters.items():
        for dataset_name in entry.dataset_names:
            dataset = experiment.components.datasets[dataset_name]
            for index in experiment.splits[dataset_name]["train"].tolist():
                try:
                    entry.counter.count(dataset_name, dataset.getitem_metadata(index))
                except Exception as error:
                    where = str(experiment.folder / "data_counters" / f"{name}.py")
                    must = f"counting point {index} of {dataset_name} must work"
                    raise PipelineError(str(user_problem(error, experiment.folder, where, must))) from error
                yield


def assemble(
    folder: Path,
    settings: Settings,
    device: torch.device,
    mesh: DeviceMesh | None = None,
    world_size: int = 1,
    original: Path | None = None,
) -> Experiment:
    """Load the pymodules below ``folder`` and put the experiment together, or raise every problem found.

    With a ``mesh``, modules are spread over its processes. ``original`` is the folder that ``folder`` is a copy of.
    """
    parts = _read_components(folder, settings, original=original)
    experiment, problems = _assemble(parts, folder, device, mesh, world_size)
    if problems:
        raise InvalidExperiment(problems)
    # How often an author's code has drawn so far must not decide what comes next.
    seed_generators(settings.training.seed, "assembled")
    return experiment


def assemble_for_evaluation(
    folder: Path, settings: Settings, device: torch.device, split: str, mesh: DeviceMesh | None = None
) -> Experiment:
    """Put together what the evaluation of one split needs: no optimizers, and no other split."""
    parts = _read_components(folder, settings)
    problems = parts.problems
    splits: Splits = {}
    if "datasets" not in parts.failed:
        splits, split_problems = read_splits(parts.components, folder, [split])
        problems += split_problems
    if problems:
        raise InvalidExperiment(problems)
    _place_modules(parts.components, device, mesh)
    return Experiment(parts.settings, parts.components, splits, {}, {}, device, folder, mesh is not None)


def read_metrics(folder: Path, settings: Settings) -> dict[str, MetricDefinition]:
    """Return the metrics of an experiment alone, whose other files are not imported."""
    loader = PymoduleLoader(folder, settings.training.seed, settings.parameters)
    reader = ContractReader(loader.load(["metrics"]))
    metrics = reader.read_metrics()
    if problems := [*loader.problems, *reader.problems]:
        raise InvalidExperiment(problems)
    return metrics


def read_modules(folder: Path, settings: Settings) -> dict[str, ModuleDefinition]:
    """Return the modules of an experiment alone, as their files make them."""
    loader = PymoduleLoader(folder, settings.training.seed, settings.parameters)
    reader = ContractReader(loader.load(["modules"]))
    modules = reader.read_modules()
    if problems := [*loader.problems, *reader.problems]:
        raise InvalidExperiment(problems)
    return modules


def read_checked_contents(folder: Path, overrides: tuple[str, ...] = ()) -> Contents:
    """Read the settings of an experiment's folder; if they are wrong, report problems of its pymodules as well.

    Every key that has a default has a value in what is returned.
    """
    try:
        return fill_in(read_contents(folder / "settings", overrides), folder)
    except InvalidExperiment as error:
        contents, wrong_files = readable_contents(folder / "settings")
        if PARAMETERS in wrong_files:
            # Any pymodule may need them.
            raise
        settings = parse_settings(fill_in(contents, folder))
        # Whether the device can synchronise BatchNorm is checked once the settings are right.
        settings = replace(settings, training=replace(settings.training, sync_batchnorm=False))
        parts = _read_components(folder / "pymodules", settings, wrong_files)
        _, problems = _assemble(parts, folder / "pymodules", CPU, None, 1)
        if not problems:
            raise
        raise InvalidExperiment([*error.problems, *problems]) from error


def assumed_settings(folder: Path, overrides: tuple[str, ...] = ()) -> list[Assumption]:
    """Return the values of all settings that valid files leave out."""
    written = read_contents(folder / "settings", overrides)
    assumptions = []
    for name, content in fill_in(written, folder).items():
        given = dict(flat(written[name]))
        added = {key: value for key, value in flat(content) if key not in given and content}
        if added:
            assumptions.append(Assumption(f"settings/{name}.json", shown_parameters(added)))
    return assumptions


def _assemble(
    parts: _Parts, folder: Path, device: torch.device, mesh: DeviceMesh | None, world_size: int
) -> tuple[Experiment, list[Problem]]:
    """Return an experiment and everything that is wrong with it; it can be used if nothing is.

    What depends on something wrong is not judged: one mistake must not be reported as many.
    """
    settings = parts.settings
    components = parts.components
    problems = parts.problems
    failed = parts.failed
    splits: Splits = {}
    if "datasets" not in failed:
        splits, split_problems = read_splits(components, folder)
        if settings.limit_batches is not None and "dataloaders" not in failed:
            splits = _limit(splits, components, settings.limit_batches)
        problems += split_problems
        if not split_problems and not failed & {"module_transforms", "loss_registers"}:
            problems += unevaluated_registers(components, settings, splits, folder)
    optimizers: dict[str, Optimizer] = {}
    schedulers: dict[str, BaseScheduler] = {}
    if "modules" not in failed:
        # Before modules are placed: sharding a module that does not fit would fail inside torch.
        module_problems = [
            *sharding_problems(components, settings.training, folder),
            *sparse_problems(components, settings, folder, world_size),
        ]
        if settings.training.sync_batchnorm:
            module_problems += sync_batchnorm_problems(device)
        problems += module_problems
        if not module_problems and "optim_sched" not in failed:
            _place_modules(components, device, mesh)
            if settings.training.sync_batchnorm:
                _synchronise_batchnorm(components)
            # After sharding: optimizers must hold the shards, not the parameters that the shards replace.
            optimizers = create_optimizers(components, settings, folder, problems)
            parts.assumptions.extend(name_groups(optimizers))
            scale_rates(optimizers, settings)
            problems += optimizer_problems(optimizers, settings.training, folder)
            # Without one optimizer, all of its parameters would be reported as being in none.
            if len(optimizers) == len(components.optim_sched):
                problems += parameter_problems(components, optimizers, folder)
            schedulers = create_schedulers(components, optimizers, folder, problems)
            problems += saving_problems(components, settings.training, folder)
            if "loss_registers" not in failed:
                problems += scheduler_problems(schedulers, settings, folder)
            if "hooks" not in failed:
                problems += unfreezing_problems(components, optimizers, folder)
    assumed = tuple(parts.assumptions)
    is_sharded = mesh is not None
    experiment = Experiment(
        settings, components, splits, optimizers, schedulers, device, folder, is_sharded, assumptions=assumed
    )
    return experiment, list(dict.fromkeys(problems))


def _limit(splits: Splits, components: Components, num_batches: int) -> Splits:
    """Return the first batches of each split, for a quick try."""
    limited: Splits = {}
    for name, indices in splits.items():
        loading = components.dataloaders[name]
        sizes = {"train": loading.train.batch_size, "val": loading.eval.batch_size}
        limited[name] = {split: points[: num_batches * sizes[split]] for split, points in indices.items()}
    return limited


@dataclass
class _Parts:
    """What the files of an experiment say, what is wrong with them, and the families and files it is wrong in."""

    settings: Settings
    components: Components
    assumptions: list[Assumption]
    problems: list[Problem]
    failed: set[str]


def _read_components(
    folder: Path, settings: Settings, wrong_files: frozenset[str] = _NO_NAMES, original: Path | None = None
) -> _Parts:
    """Import the pymodules and judge them and their names; ``wrong_files`` are settings that could not be read."""
    loader = PymoduleLoader(folder, settings.training.seed, settings.parameters, original)
    reader = ContractReader(loader.load())
    components = reader.read()
    assumptions = [*loader.assumptions, *reader.assumptions]
    if not settings.register_names:
        named = dict.fromkeys(name for entry in components.module_transforms.values() for name in entry.loss_registers)
        settings = replace(settings, loss_registers=(*map(LossRegister, named), *settings.loss_registers))
        what = f"{', '.join(named)}, all to be minimised, as in module_transforms/*.py"
        assumptions.append(Assumption("settings/loss_registers.json", what))
    # The frozen copy lists the registers of metrics with the others; an author's file need not.
    listed = {register.name for register in settings.loss_registers}
    of_metrics = tuple(
        LossRegister(name, optimize=False, direction=definition.directions[name], per="split", splits=("val",))
        for definition in components.metrics.values()
        for name in definition.names
        if name not in listed
    )
    registers = (*settings.loss_registers, *of_metrics)
    # An average that is evaluated beside its source has registers of its own for all of an evaluation.
    of_averages = tuple(
        replace(register, name=f"{name}/{register.name}", optimize=False, per="split", splits=("val",))
        for name, average in components.averages.items()
        if average.evaluate == "beside"
        for register in registers
        if "val" in register.splits and "/" not in register.name and f"{name}/{register.name}" not in listed
    )
    settings = replace(settings, loss_registers=(*registers, *of_averages))
    # A file that breaks its contract still has its name, so names are judged unless a file could not be imported.
    mismatches = name_problems(components, settings, folder, loader.failed_families | wrong_files)
    failed = loader.failed_families | reader.failed_families | wrong_files
    return _Parts(settings, components, assumptions, [*loader.problems, *reader.problems, *mismatches], failed)


def _synchronise_batchnorm(components: Components) -> None:
    # Layers are replaced inside a module. A module that is a BatchNorm layer itself stays as it is.
    for module in components.trained_modules.values():
        nn.SyncBatchNorm.convert_sync_batchnorm(module)


def _place_modules(components: Components, device: torch.device, mesh: DeviceMesh | None) -> None:
    for name, definition in components.modules.items():
        definition.module.to(device)
        if not definition.is_trained:
            definition.module.requires_grad_(False).eval()
        if definition.compile:
            compile_module(definition.module, name)
        if mesh is not None:
            shard_module(definition, mesh)
