"""Memory of the simulated device: storages that only the device's own commands may look into."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

NAME = "sim"
# What fresh memory, and the target of a copy that has not arrived yet, holds.
GARBAGE = 0xCD
LIMIT_VARIABLE = "SIMULATED_DEVICE_BYTES"
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_SET = torch.ops.aten.set_.source_Storage_storage_offset


class Usage:
    """Bytes allocated now and at most."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0
        self.limit = int(os.environ.get(LIMIT_VARIABLE, 0)) or None

    def add(self, num_bytes: int) -> None:
        if self.limit is not None and self.now + num_bytes > self.limit:
            raise torch.OutOfMemoryError(
                f"sim out of memory. Tried to allocate {num_bytes} bytes; {self.limit - self.now} of {self.limit} "
                "bytes are free."
            )
        self.now += num_bytes
        self.peak = max(self.peak, self.now)


USAGE = Usage()


class _Allocation:
    """Hangs on a storage, and so ends with it."""

    def __init__(self, num_bytes: int) -> None:
        # First, because this object may end without having been counted.
        self._num_bytes = 0
        USAGE.add(num_bytes)
        self._num_bytes = num_bytes

    def __del__(self) -> None:
        USAGE.now -= self._num_bytes


def device() -> torch.device:
    return torch.device(NAME, 0)


def refuse_second_device(index: int | None) -> None:
    if index not in (None, 0):
        raise RuntimeError(f"There is no device {NAME}:{index}: a process has one simulated device.")


def is_simulated(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def new_storage(num_bytes: int) -> Any:
    """Return a storage of the device over hidden host memory, which its attribute ``host`` owns."""
    allocation = _Allocation(num_bytes)
    host = torch.UntypedStorage(num_bytes)
    if num_bytes:
        as_bytes(host).fill_(GARBAGE)
    storage: Any = torch._C._construct_storage_from_data_pointer(host.data_ptr(), device(), num_bytes)
    storage.host, storage.allocation = host, allocation
    return storage


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def allocate(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    reach = 0 if 0 in size else 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    empty = torch._C._acc.create_empty_tensor([0], dtype)
    return place(empty, new_storage(reach * dtype.itemsize), 0, size, stride)


def allocate_like(tensor: torch.Tensor) -> torch.Tensor:
    return allocate(tensor.size(), tensor.stride(), tensor.dtype)


def place(tensor: torch.Tensor, storage: Any, offset: int, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Let a tensor of the device lie in a storage."""
    placed: torch.Tensor = _SET.redispatch(_CPU, tensor, storage, offset, list(size), list(stride))
    return placed


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor as one that kernels of the CPU can work on."""
    storage: Any = tensor.untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return empty.set_(storage.host, tensor.storage_offset(), tensor.size(), tensor.stride())


def is_pinned(tensor: torch.Tensor) -> bool:
    return getattr(tensor.untyped_storage(), "is_page_locked", False)


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Mark the memory of a tensor as page-locked."""
    storage: Any = tensor.untyped_storage()
    storage.is_page_locked = True
    return tensor


def spoil(tensor: torch.Tensor) -> None:
    """Fill host memory with garbage that a copy under way will replace."""
    span = 1 + sum((length - 1) * step for length, step in zip(tensor.size(), tensor.stride(), strict=True))
    if tensor.numel() == span:
        start = tensor.storage_offset() * tensor.element_size()
        as_bytes(tensor.untyped_storage())[start : start + span * tensor.element_size()].fill_(GARBAGE)
