"""Checksums of tensors change with every single bit."""

from __future__ import annotations

import pytest
import torch

from pipeline.distributed.checksums import checksums

TYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_flipped_bit_changes_the_checksum(dtype: torch.dtype) -> None:
    """Whatever the type, in the first part of a large tensor and in the last."""
    tensor = torch.ones(70_000).to(dtype)
    (expected,) = checksums([tensor])
    for index in (0, 65_535, 69_999):
        for position in range(8 * tensor.element_size() if dtype is not torch.bool else 1):
            changed = tensor.clone()
            changed[index : index + 1].view(torch.uint8)[position // 8] ^= 1 << position % 8
            assert checksums([changed]) != [expected], f"bit {position} of element {index}"


def test_two_flipped_signs_do_not_cancel_out() -> None:
    """The highest bit of a 64-bit number would count twice modulo 2**64, so numbers are read in halves."""
    tensor = torch.arange(1.0, 1001.0, dtype=torch.float64)
    changed = tensor.clone()
    changed[[3, 77]] *= -1
    assert checksums([tensor]) != checksums([changed])


def test_elements_and_parts_that_change_places_are_noticed() -> None:
    """Weights depend on the position within a part, and parts have weights of their own."""
    tensor = torch.arange(200_000, dtype=torch.int32)
    assert checksums([tensor]) != checksums([tensor.flip(0)])
    assert checksums([tensor]) != checksums([torch.cat([tensor[65536:131072], tensor[:65536], tensor[131072:]])])


def test_memory_order_does_not_matter() -> None:
    """Equal values are equal whatever their strides, also of tensors without elements or dimensions."""
    tensor = torch.randn(2, 3, 4, 5)
    tensors = [tensor, tensor.to(memory_format=torch.channels_last), torch.zeros(0), torch.zeros(())]
    sums = checksums(tensors)
    assert sums[0] == sums[1]
    assert sums[2:] == [0, 0]
