"""States of modules and optimizers: copied into host memory for a commit, and where they go when they come back."""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Hashable, Iterable, Mapping
from functools import partial
from typing import TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from pipeline.errors import PipelineError
from pipeline.serialization.shard_index import StoredTensor
from pipeline.serialization.sharded_files import Target, split_state, whole
from pipeline.system.accelerators import CPU, pinned_like, wait_for_copies
from pipeline.system.disk import Writer

_PLAIN = (int, float, bool, str, bytes, type(None))

# What a state dict holds: tensors and plain values in nested dicts, lists and tuples.
State = TypeVar("State")
# Tensors that were copied already, by identity, each with its copy.
_Copies = dict[Hashable, tuple[torch.Tensor, torch.Tensor]]


class Snapshots:
    """Copies tensors into buffers that are kept, because the first copy into fresh memory costs ten times as much.

    A snapshot is valid until the next one of the same owner is taken. Without ``copies``, what lies in host memory is
    the live state itself, for a caller that writes before training continues. Tensors of an accelerator are always
    copied: a file must not say which device they were on.
    """

    def __init__(self, *, copies: bool) -> None:
        self._copies = copies
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, owner: nn.Module | Optimizer, left_out: Collection[str] = ()) -> tuple[Writer, int]:
        """Return a writer of an owner's state as it is now, and its size in bytes."""
        state = owner.state_dict()
        if left_out:
            # The original may be the owner's own dict.
            state = copy.copy(state)
            for key in left_out:
                del state[key]
        check_state(name, state)
        seen: _Copies = {}
        # By the owner, not by a name: two rows may have the same name in different pools.
        held = self._copy(state, str(id(owner)), seen)
        # All copies from a device are queued before the one wait for them.
        wait_for_copies([source for source, _ in seen.values()])
        return partial(torch.save, held), _num_bytes(held)

    def _copy(self, value: State, path: str, seen: _Copies) -> State:
        if isinstance(value, dict):
            # A shallow copy keeps what hangs on a state dict besides its items, such as versions of its layers.
            copied = copy.copy(value)
            copied.clear()
            copied.update({_intern(key): self._copy(child, f"{path}/{key}", seen) for key, child in value.items()})
            return copied
        if isinstance(value, (list, tuple)):
            return type(value)(self._copy(child, f"{path}/{index}", seen) for index, child in enumerate(value))
        if isinstance(value, torch.Tensor):
            needs_copy = self._copies or value.device != CPU
            return self._copy_tensor(value, path, seen) if needs_copy else value  # type: ignore[return-value]
        return _intern(value)

    def _copy_tensor(self, tensor: torch.Tensor, path: str, seen: _Copies) -> torch.Tensor:
        tensor = tensor.detach()
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return tensor.cpu().clone()
        # Tied weights are one tensor under two names and must stay so.
        identity = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride())
        if identity not in seen:
            buffer = self._buffers.get(path)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = pinned_like(tensor)
                self._buffers[path] = buffer
            seen[identity] = (tensor, buffer.copy_(tensor, non_blocking=True))
        return seen[identity][1]


def _intern(value: State) -> State:
    """Return the one object for equal strings: a pickle's bytes depend on whether two of them are one object."""
    # After a resume, keys that were loaded are other objects than those of states that are created later.
    return sys.intern(value) if type(value) is str else value  # type: ignore[call-overload]


def check_state(name: str, state: object) -> None:
    """Refuse a state that a safe load would refuse."""
    unsafe = _find_unsafe(state)
    if unsafe is not None:
        raise PipelineError(
            f"The state of {name} must hold tensors and plain values only, but {unsafe} would not load again.\n"
            "  fix: convert it, for example a numpy number with float(…)."
        )


def _num_bytes(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    children = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(_num_bytes(child) for child in children)


def _find_unsafe(value: object, path: str = "") -> str | None:
    """Return the path and type of the first value that a safe load would refuse."""
    if isinstance(value, dict):
        children: Iterable[tuple[object, object]] = value.items()
    elif isinstance(value, (list, tuple)):
        children = enumerate(value)
    else:
        is_plain = type(value) in _PLAIN or isinstance(value, torch.Tensor)
        return None if is_plain else f"{path or 'it'} ({type(value).__name__})"
    unsafe = (_find_unsafe(child, f"{path}[{key!r}]") for key, child in children)
    return next((place for place in unsafe if place is not None), None)


def target_in(owner: nn.Module | Optimizer) -> Target:
    """Return where the stored tensors of a module or an optimizer go when they are shards spread over ranks."""
    if isinstance(owner, nn.Module):
        return partial(_target_in_module, split_state(owner.state_dict())[0])
    return partial(_target_like_parameter, [one for group in owner.param_groups for one in group["params"]])


def _target_in_module(tensors: Mapping[tuple[int | str, ...], torch.Tensor], stored: StoredTensor) -> torch.Tensor:
    """Weights and buffers go into the module's own tensors."""
    return tensors[stored.path] if stored.path in tensors else whole(stored)


def _target_like_parameter(parameters: list[nn.Parameter], stored: StoredTensor) -> torch.Tensor:
    """What an optimizer keeps in the shape of a parameter is spread like it."""
    number = stored.path[1] if stored.path[0] == "state" else None
    parameter = parameters[number] if isinstance(number, int) and number < len(parameters) else None
    if parameter is None or tuple(parameter.shape) != stored.shape:
        return whole(stored)
    return torch.empty_like(parameter, dtype=stored.dtype, requires_grad=False)
