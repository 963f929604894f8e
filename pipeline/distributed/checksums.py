"""Checksums of tensors, computed where the tensors are: cheap enough to compare all weights with every commit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

# Integers multiplied at once: with their weights they stay in a core's cache.
_PART = 1 << 16
_INTEGERS = {1: torch.uint8, 2: torch.int16}


@torch.no_grad()
def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return one 64-bit checksum per tensor, in order; the host waits for each device once.

    A checksum is the sum of the tensor's bit patterns, read as integers, each times an odd weight of its position.
    One flipped bit always changes it, because an odd number times a power of two is never 0 modulo 2**64. Signs and
    NaNs count, rounding does not exist, and the order of addition does not matter.
    """
    places: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(index)
    found = [0] * len(tensors)
    for indices in places.values():
        values = torch.stack([_checksum(tensors[index]) for index in indices]).tolist()
        for index, value in zip(indices, values, strict=True):
            found[index] = value
    return found


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    parts = _bits(tensor).split(_PART)
    weights = _weights(tensor.device)
    sums: list[torch.Tensor] = [(part * weights[: len(part)]).sum() for part in parts]
    # Two equal parts that change places must not have the same sum, so parts have weights too.
    while len(sums) > 1:
        stacked = [torch.stack(sums[first : first + _PART]) for first in range(0, len(sums), _PART)]
        sums = [(part * weights[: len(part)]).sum() for part in stacked]
    return sums[0]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bit patterns as integers of at most 32 bits.

    Integers of 64 bits would lose their highest bit: two flipped signs of float64 numbers would cancel out.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(_INTEGERS.get(flat.element_size(), torch.int32))


@lru_cache(maxsize=4)
def _weights(device: torch.device) -> torch.Tensor:
    """Return odd 64-bit integers that look random; the same on every machine, whatever its generators are."""
    mixed = np.arange(1, _PART + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift in (31, 29):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(0xD6E8FEB86659FD93)
    return torch.from_numpy((mixed | np.uint64(1)).view(np.int64)).to(device)
