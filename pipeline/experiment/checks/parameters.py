"""Parameters: who updates them, and whether their gradients can be added over the processes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from pipeline.errors import Problem
from pipeline.experiment.pymodules.definitions import Components, ModuleDefinition
from pipeline.experiment.pymodules.user_code import place_of
from pipeline.experiment.settings.settings import Settings, TrainingSettings
from pipeline.experiment.sharding import is_spread, sharding_units
from pipeline.serialization.npz_files import is_entry_name

_MAX_PARAMETERS_SHOWN = 10
_MAX_UNITS_SHOWN = 20


def sync_batchnorm_problems(device: torch.device) -> Iterator[Problem]:
    """torch synchronises BatchNorm on accelerators only."""
    if device.type == "cpu":
        where = "settings/training.json (sync_batchnorm)"
        yield Problem(where, "needs an accelerator, but this run is on the CPU", "set it to false")


def sparse_problems(components: Components, settings: Settings, folder: Path, world_size: int) -> Iterator[Problem]:
    """Yield embeddings whose sparse gradients cannot be added over ranks."""
    training = settings.training
    if training.shards_modules:
        reason = f"parallelism: {training.parallelism}"
    elif training.is_exact:
        reason = f"gradient_reduction: {training.gradient_reduction}"
    elif world_size > 1:
        reason = f"{world_size} processes"
    else:
        return
    for name, module in components.trained_modules.items():
        for path, layer in module.named_modules():
            if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse:
                what = f"{path or 'module'} must have dense gradients with {reason}, but has sparse=True"
                fix = "create it with sparse=False, or train with gradient_reduction: fast and one process"
                yield Problem(str(folder / "modules" / f"{name}.py"), what, fix)


def optimizer_problems(
    optimizers: Mapping[str, Optimizer], training: TrainingSettings, folder: Path
) -> Iterator[Problem]:
    """Yield optimizers that evaluate the loss themselves, and those that have not the turns they need."""
    for name, optimizer in optimizers.items():
        num_turns = getattr(optimizer, "turns_per_step", 1)
        given = [turn for turn in training.turns or () if name in turn]
        if num_turns > 1 and (len(given) != num_turns or not training.share_batches):
            what = f"{type(optimizer).__name__} needs {num_turns} turns over the same batches in every step"
            turns = [[name]] * (num_turns - 1) + [[*optimizers]]
            fix = f'"turns": {turns}, "share_batches": true in settings/training.json'
            yield Problem(str(folder / "optim_sched" / f"{name}.py"), what, fix.replace("'", '"'))
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        # Most optimizers of torch accept a closure; only one without a default is needed.
        if closure is not None and closure.default is inspect.Parameter.empty:
            yield Problem(
                str(folder / "optim_sched" / f"{name}.py"),
                f"an optimizer must take one step per gradient, but {type(optimizer).__name__}.step needs a closure",
                "use an optimizer whose step() can be called without arguments, such as AdamW or SGD",
            )


def parameter_problems(components: Components, optimizers: Mapping[str, Optimizer], folder: Path) -> Iterator[Problem]:
    """Yield groups without a name of their own, and parameters in the wrong number of optimizers."""
    owners: dict[int, list[str]] = {}
    for name, optimizer in optimizers.items():
        where = str(folder / "optim_sched" / f"{name}.py")
        names = [group.get("name") for group in optimizer.param_groups]
        if any(not isinstance(group_name, str) for group_name in names) or len(set(names)) < len(names):
            yield Problem(where, f"every param group must have a 'name' of its own, but the names are {names}")
        for group_name in names:
            # Records name a column after each group, and a file with such a name could not be read back.
            if isinstance(group_name, str) and not is_entry_name(group_name):
                what = f"the name of a param group must be plain text without '..', but is {group_name!r}"
                yield Problem(where, what)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                owners.setdefault(id(parameter), []).append(name)
    # Parameters that an optimizer was given, but that no module has, are trained and lost with the process.
    known = {id(parameter) for entry in components.modules.values() for parameter in entry.module.parameters()}
    for name in sorted({name for parameter, names in owners.items() if parameter not in known for name in names}):
        what = "every parameter must belong to a module in modules/, but some do not: they would not be saved"
        yield Problem(str(folder / "optim_sched" / f"{name}.py"), what)
    for module_name, entry in components.modules.items():
        where = place_of(folder / "modules" / f"{module_name}.py", "module")
        yield from _owner_problems(module_name, entry, owners, where)


def _owner_problems(
    module: str, entry: ModuleDefinition, owners: Mapping[int, list[str]], where: str
) -> Iterator[Problem]:
    """Yield one problem for all parameters of a module that are in the same wrong optimizers."""
    misplaced: dict[str, list[str]] = {}
    for name, parameter in entry.module.named_parameters():
        optimizers = owners.get(id(parameter), [])
        # One that requires no gradient may be in an optimizer or not: authors change the flag between steps.
        is_misplaced = bool(optimizers) if not entry.is_trained else parameter.requires_grad and len(optimizers) != 1
        if is_misplaced:
            misplaced.setdefault(" and ".join(optimizers) or "none", []).append(repr(name))
    for found_in, names in misplaced.items():
        more = f" and {len(names) - _MAX_PARAMETERS_SHOWN} more" if len(names) > _MAX_PARAMETERS_SHOWN else ""
        kind = "frozen parameters" if entry.frozen else "parameters of an average"
        must = "every parameter must be in exactly one" if entry.is_trained else f"{kind} must be in no"
        what = f"{must} optimizer, but {', '.join(names[:_MAX_PARAMETERS_SHOWN])}{more} are in {found_in}"
        train = f'give modules["{module}"].parameters() to one in create_optimizer'
        fix = (
            "leave them out of create_optimizer"
            if not entry.is_trained
            else f'{train}, or set settings = {{"frozen": True}}'
        )
        yield Problem(where, what, fix)


def sharding_problems(components: Components, settings: TrainingSettings, folder: Path) -> Iterator[Problem]:
    """Yield why modules cannot be sharded; patterns must match even where sharding is not asked for."""
    for name, definition in components.modules.items():
        where = str(folder / "modules" / f"{name}.py")
        paths = [path for path, _ in definition.module.named_modules() if path]
        for pattern in definition.shard or ():
            if not any(fnmatchcase(path, pattern) for path in paths):
                listed = ", ".join(paths[:_MAX_UNITS_SHOWN]) or "none"
                more = f" and {len(paths) - _MAX_UNITS_SHOWN} more" if len(paths) > _MAX_UNITS_SHOWN else ""
                what = f"settings['shard'] must name submodules, but {pattern!r} fits none; there are {listed}{more}"
                yield Problem(where, what)
        if settings.shards_modules and is_spread(definition):
            yield from _unit_problems(definition, where)
    if settings.shards_modules:
        yield from _tying_problems(components, folder)


def _unit_problems(definition: ModuleDefinition, where: str) -> Iterator[Problem]:
    """Yield units that torch cannot gather, and parameters that it cannot split."""
    containers = [
        path or "module"
        for path, unit in (*sharding_units(definition), ("", definition.module))
        if isinstance(unit, (nn.ModuleList, nn.ModuleDict))
    ]
    if containers:
        what = (
            f"parallelism: fsdp gathers a module when it is called, but {', '.join(containers)} only holds others; "
            "give it a forward, or name what it holds in settings['shard']"
        )
        yield Problem(where, what)
    scalars = [name for name, parameter in definition.module.named_parameters() if not parameter.dim()]
    if scalars:
        what = f"parallelism: fsdp needs parameters with a dimension, but {', '.join(scalars)} has none; use shape (1,)"
        yield Problem(where, what)


@dataclass(frozen=True)
class _Unit:
    """What is gathered together: a submodule, or the rest of a module. A unit that is not spread stays whole."""

    module: str
    submodule: str
    is_spread: bool

    def __str__(self) -> str:
        if not self.is_spread:
            return f"the frozen modules/{self.module}.py"
        return f"unit {self.submodule or 'module'} of modules/{self.module}.py"


def _tying_problems(components: Components, folder: Path) -> Iterator[Problem]:
    """Yield parameters in two units: each unit would shard them separately and untie them."""
    paths_of: dict[nn.Parameter, dict[_Unit, str]] = {}
    for name, definition in components.modules.items():
        for unit, path, parameter in _unit_parameters(name, definition):
            paths_of.setdefault(parameter, {}).setdefault(unit, path)
    tied: dict[tuple[_Unit, _Unit], list[tuple[str, str]]] = {}
    for paths in paths_of.values():
        # Units that stay whole keep the parameter itself. Frozen modules may share it among themselves.
        if len(paths) > 1 and any(unit.is_spread for unit in paths):
            first, second = list(paths)[:2]
            tied.setdefault((first, second), []).append((paths[first], paths[second]))
    # One problem for each pair of units: tied blocks may share hundreds of parameters.
    for (first, second), pairs in tied.items():
        firsts, seconds = (", ".join(column[:_MAX_UNITS_SHOWN]) for column in zip(*pairs, strict=True))
        more = f" ({len(pairs)} in all)" if len(pairs) > _MAX_UNITS_SHOWN else ""
        is_inside = first.module == second.module
        fix = "take the pattern of the unit out of settings['shard']" if is_inside else "tie weights inside one module"
        yield Problem(
            str(folder / "modules" / f"{second.module}.py"),
            "parallelism: fsdp keeps weights tied inside one unit only, "
            f"but {firsts} in {first} and {seconds} in {second} are the same{more}",
            f"{fix}, or use parallelism: ddp",
        )


def _unit_parameters(name: str, definition: ModuleDefinition) -> Iterator[tuple[_Unit, str, nn.Parameter]]:
    """Yield every parameter under each of its names, with the nearest unit around it."""
    is_module_spread = is_spread(definition)
    # By identity: a submodule that is used in two places is one unit, whatever it is called there.
    matched = {id(module): path for path, module in sharding_units(definition)} if is_module_spread else {}
    unit_around = {"": ""}
    for path, module in definition.module.named_modules(remove_duplicate=False):
        if path:
            unit_around[path] = matched.get(id(module), unit_around[path.rpartition(".")[0]])
        for parameter_name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            unit = _Unit(name, unit_around[path], is_module_spread)
            yield unit, f"{path}.{parameter_name}".removeprefix("."), parameter
