"""Checksums of tensors, computed on the device of each tensor.

They cost about as much as a copy, so that all weights can be compared between ranks before every commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

# Number of integers that are multiplied at once: together with their weights they stay in a core's cache.
_PART_SIZE = 1 << 16
# Integer types by element size; wider elements are read as several int32. Not as int64: its highest bit times any odd
# weight is that bit again, modulo 2**64, so two flipped signs of float64 numbers would cancel out.
_INTEGER_TYPES = {1: torch.uint8, 2: torch.int16}


@torch.no_grad()
def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return one 64-bit checksum per tensor, in order.

    A checksum is the sum of the tensor's bit patterns, read as integers, each times an odd weight of its position,
    modulo 2**64. One flipped bit always changes it, because an odd number times a power of two below 2**64 is never 0
    modulo 2**64. Signs and NaNs count. Integers are not rounded, so the order of additions does not matter.
    """
    indices_by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        indices_by_device.setdefault(tensor.device, []).append(index)
    results = [0] * len(tensors)
    for indices in indices_by_device.values():
        # One transfer per device: the host waits once for all of its tensors instead of once for each.
        values = torch.stack([_checksum(tensors[index]) for index in indices]).tolist()
        for index, value in zip(indices, values, strict=True):
            results[index] = value
    return results


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    # Conjugated and negated views are lazy flags of torch: without resolving them, the bits would be the original's.
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    parts = flat.view(_INTEGER_TYPES.get(flat.element_size(), torch.int32)).split(_PART_SIZE)
    weights = _weights(tensor.device)
    sums: list[torch.Tensor] = [(part * weights[: len(part)]).sum() for part in parts]
    # The sums of parts are weighted as well: otherwise two parts could be swapped without a change.
    while len(sums) > 1:
        stacked = [torch.stack(sums[first : first + _PART_SIZE]) for first in range(0, len(sums), _PART_SIZE)]
        sums = [(part * weights[: len(part)]).sum() for part in stacked]
    return sums[0]


@lru_cache(maxsize=4)
def _weights(device: torch.device) -> torch.Tensor:
    """Return pseudo-random odd 64-bit integers."""
    # Computed by formula: ranks with other versions of torch or numpy must get the same ones.
    mixed = np.arange(1, _PART_SIZE + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift in (31, 29):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(0xD6E8FEB86659FD93)
    return torch.from_numpy((mixed | np.uint64(1)).view(np.int64)).to(device)
