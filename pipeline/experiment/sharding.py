"""Sharding: which parts of which modules are spread over the processes, with torch's FSDP2.

Its packages are imported only where modules are sharded: they make torch half as long again to start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipeline.distributed.processes import Processes
from pipeline.errors import Problem
from pipeline.experiment.pymodules.definitions import Components, ModuleDefinition
from pipeline.experiment.settings.settings import FSDP, TrainingSettings
from pipeline.serialization.shard_index import is_sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as DeviceMesh
else:
    DeviceMesh = Any

_SHOWN = 20


def mesh_of(processes: Processes, settings: TrainingSettings) -> DeviceMesh | None:
    """Return the processes as what modules are spread over, if there are several and the settings ask for it."""
    if settings.parallelism != FSDP or processes.world_size == 1:
        return None
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(processes.device.type, (processes.world_size,))


def sharding_problems(components: Components, settings: TrainingSettings, folder: Path) -> Iterator[Problem]:
    """Yield what stands against sharding; patterns must fit even where it is not asked for."""
    for name, definition in components.modules.items():
        where = str(folder / "modules" / f"{name}.py")
        yield from (Problem(where, what) for what in _unmatched(definition))
        if settings.parallelism == FSDP and _is_spread(definition):
            yield from (Problem(where, what) for what in _unfit(definition))
    if settings.parallelism == FSDP:
        yield from _tying_problems(components, folder)


def _is_spread(definition: ModuleDefinition) -> bool:
    """A frozen module has neither gradients nor optimizer state, so it stays whole unless its author says otherwise."""
    has_any = next(definition.module.parameters(), None) is not None
    return has_any and (not definition.frozen or definition.shard is not None)


def _unmatched(definition: ModuleDefinition) -> Iterator[str]:
    names = [name for name, _ in definition.module.named_modules() if name]
    for pattern in definition.shard or ():
        if not any(fnmatchcase(name, pattern) for name in names):
            listed = ", ".join(names[:_SHOWN]) or "none"
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            yield f"settings['shard'] must name submodules, but {pattern!r} fits none; there are {listed}{more}"


def _unfit(definition: ModuleDefinition) -> Iterator[str]:
    containers = [
        name or "module"
        for name, unit in (*_units(definition), ("", definition.module))
        if isinstance(unit, (nn.ModuleList, nn.ModuleDict))
    ]
    if containers:
        yield (
            f"parallelism: fsdp gathers a module when it is called, but {', '.join(containers)} only holds others; "
            "give it a forward, or name what it holds in settings['shard']"
        )
    scalars = [name for name, parameter in definition.module.named_parameters() if not parameter.dim()]
    if scalars:
        yield f"parallelism: fsdp needs parameters with a dimension, but {', '.join(scalars)} has none; use shape (1,)"


@dataclass(frozen=True)
class _Unit:
    """What is gathered together: a submodule, or what is left of a module; one that is not spread stays whole."""

    module: str
    submodule: str
    is_spread: bool

    def __str__(self) -> str:
        if not self.is_spread:
            return f"the frozen modules/{self.module}.py"
        return f"unit {self.submodule or 'module'} of modules/{self.module}.py"


def _tying_problems(components: Components, folder: Path) -> Iterator[Problem]:
    """Yield parameters that lie in two units: each unit makes shards of its own of them, which are tied no more."""
    places: dict[nn.Parameter, dict[_Unit, str]] = {}
    for name, definition in components.modules.items():
        for unit, path, parameter in _unit_parameters(name, definition):
            places.setdefault(parameter, {}).setdefault(unit, path)
    shared: dict[tuple[_Unit, _Unit], list[tuple[str, str]]] = {}
    for paths in places.values():
        # Units that stay whole keep the parameter itself. Frozen modules may share it among themselves.
        if len(paths) > 1 and any(unit.is_spread for unit in paths):
            first, second = list(paths)[:2]
            shared.setdefault((first, second), []).append((paths[first], paths[second]))
    for (first, second), names in shared.items():
        ones, others = (", ".join(column[:_SHOWN]) for column in zip(*names, strict=True))
        more = f" ({len(names)} in all)" if len(names) > _SHOWN else ""
        what = f"but {ones} in {first} and {others} in {second} are the same{more}"
        is_inside = first.module == second.module
        fix = "take the pattern of the unit out of settings['shard']" if is_inside else "tie weights inside one module"
        where = str(folder / "modules" / f"{second.module}.py")
        yield Problem(
            where,
            f"parallelism: fsdp keeps weights tied inside one unit only, {what}",
            f"{fix}, or use parallelism: ddp",
        )


def _unit_parameters(name: str, definition: ModuleDefinition) -> Iterator[tuple[_Unit, str, nn.Parameter]]:
    """Yield every parameter under each of its names, with the nearest unit around it."""
    is_spread = _is_spread(definition)
    # By identity: a submodule that is used in two places is one unit, whatever it is called there.
    matched = {id(module): path for path, module in _units(definition)} if is_spread else {}
    enclosing = {"": ""}
    for path, module in definition.module.named_modules(remove_duplicate=False):
        if path:
            enclosing[path] = matched.get(id(module), enclosing[path.rpartition(".")[0]])
        for own_name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            unit = _Unit(name, enclosing[path], is_spread)
            yield unit, f"{path}.{own_name}".removeprefix("."), parameter


def _units(definition: ModuleDefinition) -> list[tuple[str, nn.Module]]:
    """Return the submodules that become units of their own, inner ones before those around them."""
    found = [(name, one) for name, one in definition.module.named_modules() if name]
    matched = [one for one in found if any(fnmatchcase(one[0], pattern) for pattern in definition.shard or ())]
    return sorted(matched, key=lambda one: -one[0].count("."))


def shard_module(definition: ModuleDefinition, mesh: DeviceMesh) -> None:
    """Spread a module over the processes of a mesh: it, and each unit within it, is gathered when it is called."""
    from torch.distributed.fsdp import fully_shard

    if _is_spread(definition):
        for _, unit in (*_units(definition), ("", definition.module)):
            if next(unit.parameters(), None) is not None:
                fully_shard(unit, mesh=mesh)


def spread_like(own: Any, value: Any) -> Any:
    """Return a whole tensor as what a module has in its place: this rank's shard of it, or itself."""
    if not is_sharded(own) or not isinstance(value, torch.Tensor):
        return value
    from torch.distributed.tensor import distribute_tensor

    whole = value.to(own.device, own.dtype)
    return distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None)
