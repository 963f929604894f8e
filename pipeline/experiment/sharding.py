"""Sharding: which parts of which modules are spread over the processes, with torch's FSDP2.

Its packages are imported only where modules are sharded: they make torch take half as long again to start.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import nn

from pipeline.distributed.processes import Processes
from pipeline.experiment.pymodules.definitions import ModuleDefinition
from pipeline.experiment.settings.settings import TrainingSettings
from pipeline.serialization.shard_index import is_sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def mesh_of(processes: Processes, settings: TrainingSettings) -> DeviceMesh | None:
    """Return the mesh of all processes, if there are several and the settings ask for sharding."""
    # One process keeps plain modules. The files it writes are the same.
    if not settings.shards_modules or processes.world_size == 1:
        return None
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(processes.device.type, (processes.world_size,))


def is_spread(definition: ModuleDefinition) -> bool:
    """Return whether sharding applies to a module."""
    has_parameters = next(definition.module.parameters(), None) is not None
    # A frozen module has neither gradients nor optimizer state, so it stays whole unless its author says otherwise.
    return has_parameters and (not definition.frozen or definition.shard is not None)


def sharding_units(definition: ModuleDefinition) -> list[tuple[str, nn.Module]]:
    """Return the submodules that become units of their own, inner ones before those around them."""
    units = [
        (path, submodule)
        for path, submodule in definition.module.named_modules()
        if path and any(fnmatchcase(path, pattern) for pattern in definition.shard or ())
    ]
    # fully_shard takes the parameters that no unit inside has taken, so inner units come first.
    return sorted(units, key=_depth, reverse=True)


def _depth(unit: tuple[str, nn.Module]) -> int:
    return unit[0].count(".")


def shard_module(definition: ModuleDefinition, mesh: DeviceMesh) -> None:
    """Spread a module over the processes of a mesh: it, and each unit within it, is gathered when it is called."""
    from torch.distributed.fsdp import fully_shard

    if is_spread(definition):
        for _, unit in (*sharding_units(definition), ("", definition.module)):
            if next(unit.parameters(), None) is not None:
                fully_shard(unit, mesh=mesh)


def spread_like(current: object, value: object) -> object:
    """Return a whole tensor in the form of a module's current one: this rank's shard of it, or the tensor itself."""
    if not isinstance(current, torch.Tensor) or not is_sharded(current) or not isinstance(value, torch.Tensor):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(current, DTensor)
    whole = value.to(current.device, current.dtype)
    # Every rank has loaded the whole tensor, so no rank sends it to the others.
    return distribute_tensor(whole, current.device_mesh, current.placements, src_data_rank=None)
