"""What must be the same on every rank, by name, and how a difference is reported."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Hashable, Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from pipeline.distributed.agreement import Values, find_differences
from pipeline.distributed.checksums import checksums
from pipeline.distributed.processes import Processes
from pipeline.errors import RanksDiffer
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
Modules = Mapping[str, nn.Module]
# Where a value is in a nested state.
KeyPath = tuple[int | str, ...]


def refuse_differences(processes: Processes, values: Values, when: str, hooks: Iterable[str] = ()) -> None:
    """End the run on all ranks, naming the first value that is not the same on all of them.

    ``hooks`` are the names of those that may have changed it.
    """
    differences = find_differences(processes, values)
    if differences:
        more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
        files = ", ".join(f"hooks/{name}.py" for name in hooks)
        suspects = [f"a hook that acts by rank, batch or time: {files}"] if files else []
        reasons = "".join(f"\n    - {reason}" for reason in (*suspects, *_REASONS))
        raise RanksDiffer(
            f"Ranks must be equal, but {differences[0]}{more}, found {when}. Nothing of this was committed.\n"
            f"  likely reasons:{reasons}\n  fix: {_FIX}"
        ).shared()


def flag_values(modules: Modules) -> dict[str, bool]:
    """Return the requires_grad flag of every parameter."""
    return {
        f"requires_grad of {name!r} in module {module_name!r}": parameter.requires_grad
        for module_name, module in modules.items()
        for name, parameter in module.named_parameters()
    }


def module_tensors(modules: Modules) -> Tensors:
    """Return the weights and saved buffers that every rank has whole."""
    tensors: Tensors = {}
    for module_name, module in modules.items():
        for name, parameter in module.named_parameters():
            tensors[f"weight {name!r} of module {module_name!r}"] = parameter
        for path, layer in module.named_modules():
            # Buffers that are not saved may differ: a resumed run would not find them either.
            for name, buffer in layer._buffers.items():
                if buffer is not None and name not in layer._non_persistent_buffers_set:
                    tensors[f"buffer {f'{path}.{name}'.lstrip('.')!r} of module {module_name!r}"] = buffer
    # Shards differ by design.
    return {name: tensor for name, tensor in tensors.items() if not is_sharded(tensor)}


def extra_state_values(modules: Modules) -> dict[str, str]:
    """Return what layers save besides tensors."""
    return {name: fingerprint(layer.get_extra_state()) for name, layer in layers_with_extra_state(modules).items()}


def layers_with_extra_state(modules: Modules) -> dict[str, nn.Module]:
    return {
        f"extra state of {path or 'the whole'!r} in module {module_name!r}": layer
        for module_name, module in modules.items()
        for path, layer in module.named_modules()
        if type(layer).get_extra_state is not nn.Module.get_extra_state
    }


def optimizer_state(modules: Modules, optimizers: Mapping[str, Optimizer]) -> tuple[Tensors, dict[str, str]]:
    """Return the tensors of all optimizers that every rank has whole, and their other values."""
    names = {
        id(parameter): f"{module_name}.{name}"
        for module_name, module in modules.items()
        for name, parameter in module.named_parameters()
    }
    tensors: Tensors = {}
    others: dict[str, str] = {}
    for optimizer_name, optimizer in optimizers.items():
        parameters = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
        for path, value in _leaves(optimizer.state_dict(), ()):
            # Say in words where a value of the state dict belongs.
            place = f"value {'.'.join(map(str, path))!r}"
            match path:
                case ("state", int(index), *keys) if index < len(parameters):
                    place = f"state {'.'.join(map(str, keys))!r} of weight {parameters[index]!r}"
                case ("param_groups", int(index), *keys) if index < len(optimizer.param_groups):
                    group_name = optimizer.param_groups[index].get("name", index)
                    place = f"{'.'.join(map(str, keys))!r} of group {group_name!r}"
            label = f"{place} of optimizer {optimizer_name!r}"
            if not isinstance(value, torch.Tensor):
                others[label] = fingerprint(value)
            elif not is_sharded(value):
                tensors[label] = value
    return tensors, others


def _leaves(value: object, path: KeyPath) -> Iterator[tuple[KeyPath, object]]:
    """Yield every value in nested dicts, lists and tuples, with its place."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _leaves(child, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, child in enumerate(value):
            yield from _leaves(child, (*path, index))
    else:
        yield path, value


def tensor_values(tensors: Tensors) -> dict[str, tuple[Hashable, str, tuple[int, ...]]]:
    """Return what is compared of tensors: a checksum of their bits, their type and their shape."""
    plain = {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    }
    digests: dict[str, Hashable] = dict(zip(plain, checksums(list(plain.values())), strict=True))
    for name, tensor in tensors.items():
        if name not in plain:
            # A sparse, quantised or nested tensor has no bits in one place: compare the file it would be saved to.
            buffer = io.BytesIO()
            torch.save(tensor.detach().cpu(), buffer)
            digests[name] = hashlib.sha256(buffer.getvalue()).hexdigest()
    return {name: (digests[name], str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}
