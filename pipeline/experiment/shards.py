"""Modules and optimizers out of folders of shards, or out of files."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from pipeline.runtime.safe_loading import load_tensors
from pipeline.runtime.shard_index import StoredTensor
from pipeline.runtime.sharded_files import Target, load_shards, split_state, whole


def load_module(module: nn.Module, path: Path) -> None:
    """Bring a module to what was saved; of shards, this rank reads those that it needs."""
    module.load_state_dict(load_shards(path, targets_in(module)) if path.is_dir() else load_tensors(path))


def targets_in(module: nn.Module) -> Target:
    """Return where the stored tensors of a module go: into its own."""
    own, _ = split_state(module.state_dict())
    return lambda stored: own[stored.path] if stored.path in own else whole(stored)


def load_optimizer(optimizer: Optimizer, path: Path) -> None:
    """Bring an optimizer to what was saved."""
    optimizer.load_state_dict(load_shards(path, _targets_beside(optimizer)) if path.is_dir() else load_tensors(path))


def _targets_beside(optimizer: Optimizer) -> Target:
    """Return where the state of an optimizer goes: what is shaped like a parameter is spread like it."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def target(stored: StoredTensor) -> torch.Tensor:
        number = stored.path[1] if stored.path[0] == "state" else None
        parameter = parameters[number] if isinstance(number, int) and number < len(parameters) else None
        if parameter is None or tuple(parameter.shape) != stored.shape:
            return whole(stored)
        return torch.empty_like(parameter, dtype=stored.dtype, requires_grad=False)

    return target
