"""Snapshots: the state of modules and optimizers as it is now, in host memory that is used again and again."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable
from typing import Any, BinaryIO

import torch

from pipeline.errors import PipelineError
from pipeline.system.accelerators import CPU, pinned_like, wait_for_copies
from pipeline.system.disk import Writer

_PLAIN = (int, float, bool, str, bytes, type(None))


class Snapshots:
    """Copies tensors into buffers that are kept, because the first copy into fresh memory costs ten times as much.

    A snapshot is valid until the next one of the same name is taken. Without ``copies``, what lies in host memory is
    the live state itself, for a caller that writes before training continues. Tensors of an accelerator are always
    copied: a file must not say which device they were on.
    """

    def __init__(self, *, copies: bool) -> None:
        self._copies = copies
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, owner: Any) -> tuple[Writer, int]:
        """Return a writer of an owner's state as it is now, and its size in bytes."""
        state = owner.state_dict()
        check_state(name, state)
        seen: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        held = self._copy(state, name, seen)
        wait_for_copies([source for source, _ in seen.values()])
        return _tensor_writer(held), _num_bytes(held)

    def _copy(self, value: Any, path: str, seen: dict[Any, tuple[torch.Tensor, torch.Tensor]]) -> Any:
        if isinstance(value, dict):
            # A shallow copy keeps what hangs on a state dict besides its items, such as versions of its layers.
            copied = copy.copy(value)
            copied.clear()
            copied.update({_unique(key): self._copy(child, f"{path}/{key}", seen) for key, child in value.items()})
            return copied
        if isinstance(value, (list, tuple)):
            return type(value)(self._copy(child, f"{path}/{index}", seen) for index, child in enumerate(value))
        if isinstance(value, torch.Tensor):
            return self._buffered(value, path, seen) if self._copies or value.device != CPU else value
        return _unique(value)

    def _buffered(
        self, tensor: torch.Tensor, path: str, seen: dict[Any, tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
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


def _unique(value: Any) -> Any:
    """Return the one object for equal strings: a pickle's bytes depend on whether two of them are one object.

    After a resume, keys that were loaded are other objects than those of states that are created later.
    """
    return sys.intern(value) if type(value) is str else value


def check_state(name: str, state: Any) -> None:
    """Refuse a state that a safe load would refuse."""
    odd = _first_odd(state)
    if odd is not None:
        raise PipelineError(
            f"The state of {name} must hold tensors and plain values only, but {odd} would not load again.\n"
            "  fix: convert it, for example a numpy number with float(…)."
        )


def _tensor_writer(state: Any) -> Writer:
    def write(file: BinaryIO) -> None:
        torch.save(state, file)

    return write


def _num_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    children = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(_num_bytes(child) for child in children)


def _first_odd(value: Any, path: str = "") -> str | None:
    """Return the path and type of the first value that a safe load would refuse."""
    if isinstance(value, dict):
        children: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, (list, tuple)):
        children = enumerate(value)
    else:
        is_plain = type(value) in _PLAIN or isinstance(value, torch.Tensor)
        return None if is_plain else f"{path or 'it'} ({type(value).__name__})"
    found = (_first_odd(child, f"{path}[{key!r}]") for key, child in children)
    return next((odd for odd in found if odd is not None), None)
