"""What must be the same on every rank, by name, and how a difference is reported."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import nn

from pipeline.distributed.agreement import Values, find_differences
from pipeline.distributed.checksums import checksums
from pipeline.distributed.processes import Processes
from pipeline.errors import RanksDiffer
from pipeline.experiment.assembly import Experiment
from pipeline.serialization.fingerprint import fingerprint
from pipeline.serialization.shard_index import is_sharded

_REASONS = (
    "a value drawn at import from a generator of its own, such as np.random.default_rng(), whose seed differs per rank",
    "a file that is not the same on every machine, or an old version of it in the cache of a network file system",
    "a time, a path or a set in what save() of a component writes",
    "code that depends on the rank, on a batch or on the time: in a scheduler, a policy, an optimizer or a module",
    "unequal or faulty hardware",
)
_FIX = (
    "draw from the generators of python, numpy and torch, which are seeded alike on every rank, and decide nothing by "
    "rank or batch; then run again. If the machines are unequal, use equal ones, or start an experiment with "
    "gradient_reduction: fast and on_rank_difference: broadcast. If it is always the same machine that differs, test "
    "its memory and devices."
)
Tensors = dict[str, torch.Tensor]


def refuse_differences(processes: Processes, values: Values, when: str) -> None:
    """End the run on all ranks, naming the first value that is not the same on all of them."""
    differences = find_differences(processes, values)
    if differences:
        more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
        reasons = "".join(f"\n    - {reason}" for reason in _REASONS)
        raise RanksDiffer(
            f"Ranks must be equal, but {differences[0]}{more}, found {when}. Nothing of this was committed.\n"
            f"  likely reasons:{reasons}\n  fix: {_FIX}"
        ).shared()


def flag_values(experiment: Experiment) -> dict[str, bool]:
    """Return the requires_grad flag of every parameter."""
    return {
        f"requires_grad of {name!r} in module {module!r}": parameter.requires_grad
        for module, one in experiment.components.all_modules.items()
        for name, parameter in one.named_parameters()
    }


def module_tensors(experiment: Experiment) -> Tensors:
    """Return the weights and saved buffers that every rank has whole."""
    found: Tensors = {}
    for module_name, module in experiment.components.all_modules.items():
        weights = dict(module.named_parameters())
        found |= {f"weight {name!r} of module {module_name!r}": one for name, one in weights.items()}
        found |= {f"buffer {name!r} of module {module_name!r}": one for name, one in _saved_buffers(module)}
    return {name: tensor for name, tensor in found.items() if not is_sharded(tensor)}


def _saved_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, layer in module.named_modules():
        for name, buffer in layer._buffers.items():
            if buffer is not None and name not in layer._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def extra_state_values(experiment: Experiment) -> dict[str, str]:
    """Return what layers save besides tensors."""
    return {name: fingerprint(layer.get_extra_state()) for name, layer in layers_with_extra_state(experiment).items()}


def layers_with_extra_state(experiment: Experiment) -> dict[str, nn.Module]:
    return {
        f"extra state of {path or 'the whole'!r} in module {module_name!r}": layer
        for module_name, module in experiment.components.all_modules.items()
        for path, layer in module.named_modules()
        if type(layer).get_extra_state is not nn.Module.get_extra_state
    }


def optimizer_state(experiment: Experiment) -> tuple[Tensors, dict[str, str]]:
    """Return the tensors of all optimizers that every rank has whole, and their other values."""
    names = {
        id(parameter): f"{module}.{name}"
        for module, one in experiment.components.all_modules.items()
        for name, parameter in one.named_parameters()
    }
    tensors: Tensors = {}
    others: dict[str, str] = {}
    for optimizer_name, optimizer in experiment.optimizers.items():
        parameters = [names[id(one)] for group in optimizer.param_groups for one in group["params"]]
        for path, value in _leaves(optimizer.state_dict(), ()):
            label = f"{_place(path, parameters, optimizer.param_groups)} of optimizer {optimizer_name!r}"
            if not isinstance(value, torch.Tensor):
                others[label] = fingerprint(value)
            elif not is_sharded(value):
                tensors[label] = value
    return tensors, others


def _leaves(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _leaves(child, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, child in enumerate(value):
            yield from _leaves(child, (*path, index))
    else:
        yield path, value


def _place(path: tuple[Any, ...], parameters: list[str], groups: list[dict[str, Any]]) -> str:
    """Return where a value of an optimizer's state dict belongs, in words."""
    match path:
        case ("state", int(index), *keys) if index < len(parameters):
            return f"state {'.'.join(map(str, keys))!r} of weight {parameters[index]!r}"
        case ("param_groups", int(index), *keys) if index < len(groups):
            return f"{'.'.join(map(str, keys))!r} of group {groups[index].get('name', index)!r}"
    return f"value {'.'.join(map(str, path))!r}"


def tensor_values(tensors: Tensors) -> dict[str, tuple[Hashable, str, tuple[int, ...]]]:
    """Return what is compared of tensors: a checksum of their bits, their type and their shape."""
    plain = {name: tensor for name, tensor in tensors.items() if _is_plain(tensor)}
    found: dict[str, Hashable] = dict(zip(plain, checksums(list(plain.values())), strict=True))
    return {
        name: (found[name] if name in found else _saved_digest(tensor), str(tensor.dtype), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def _saved_digest(tensor: torch.Tensor) -> str:
    """Return a digest of a sparse, quantised or nested tensor, which has no bits in one place."""
    buffer = io.BytesIO()
    torch.save(tensor.detach().cpu(), buffer)
    return hashlib.sha256(buffer.getvalue()).hexdigest()
