"""Where stored tensors go: into the shards of modules and optimizers that are spread over processes."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from pipeline.serialization.shard_index import StoredTensor
from pipeline.serialization.sharded_files import Target, split_state, whole


def targets_in(module: nn.Module) -> Target:
    """Return where the stored tensors of a module go: into its own."""
    own, _ = split_state(module.state_dict())
    return lambda stored: own[stored.path] if stored.path in own else whole(stored)


def targets_beside(optimizer: Optimizer) -> Target:
    """Return where the state of an optimizer goes: what is shaped like a parameter is spread like it."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def target(stored: StoredTensor) -> torch.Tensor:
        number = stored.path[1] if stored.path[0] == "state" else None
        parameter = parameters[number] if isinstance(number, int) and number < len(parameters) else None
        if parameter is None or tuple(parameter.shape) != stored.shape:
            return whole(stored)
        return torch.empty_like(parameter, dtype=stored.dtype, requires_grad=False)

    return target
