"""Sums over the batches of a step, in one process; several are compared by tests of whole runs."""

from __future__ import annotations

import pytest
import torch

from pipeline.distributed.processes import Processes
from pipeline.training.engines.reduction import _BUCKET_BYTES, TreeSums, _buckets, gradient_norms


def test_absent_tensors_add_nothing() -> None:
    """A batch that lacks a tensor leaves the others' sum as it is, to the sign of zero."""
    sums = TreeSums([torch.zeros(2), torch.zeros(1)], Processes())
    sums.begin(3)
    for tensors in ([torch.tensor([-0.0, 1.0]), None], [None, None], [torch.tensor([-0.0, 2.0]), None]):
        sums.add(tensors)  # type: ignore[arg-type]
    total, missing = sums.total()
    assert total is not None
    assert missing is None
    assert total.tolist() == [0.0, 3.0]
    assert torch.signbit(total[0])


def test_sum_is_that_of_the_tree() -> None:
    """Seven numbers are added as the tree says, which rounds otherwise than adding one after the other."""
    values = [torch.tensor([value]) for value in (1e8, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0)]
    sums = TreeSums([torch.zeros(1)], Processes())
    sums.begin(7)
    for value in values:
        sums.add([value.clone()])
    a, b, c, d, e, f, g = values
    assert torch.equal(sums.total()[0], ((a + b) + (c + d)) + ((e + f) + g))  # type: ignore[arg-type]
    assert not torch.equal(sum(values), ((a + b) + (c + d)) + ((e + f) + g))  # type: ignore[arg-type]


def test_buckets_cut_large_tensors_and_keep_types_apart() -> None:
    """No bucket holds more than its limit or two types, and together they hold every element once, in order."""
    like = [torch.empty(size, device="meta") for size in (5, _BUCKET_BYTES, 3)]
    like.append(torch.empty(4, dtype=torch.int64, device="meta"))
    buckets = list(_buckets(like, 3))
    pieces = [piece for bucket in buckets for piece in bucket]
    assert [len({like[piece.tensor].dtype for piece in bucket}) for bucket in buckets] == [1] * len(buckets)
    assert all(sum(piece.stop - piece.start for piece in bucket) * 4 <= _BUCKET_BYTES for bucket in buckets[:-1])
    for index, tensor in enumerate(like):
        own = [element for piece in pieces if piece.tensor == index for element in (piece.start, piece.stop)]
        assert own[0] == 0
        assert own[-1] == tensor.numel()
        assert own[1:-1:2] == own[2::2]


def test_norms_of_unusual_gradients_are_right() -> None:
    """Double, complex and sparse gradients count as much as others, entries of one place of a sparse one together."""
    twice = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([3.0, 4.0]), (3,))
    norms = gradient_norms([torch.ones(3).double(), torch.full((2,), 3 + 4j), twice])
    assert [float(norm) for norm in norms] == pytest.approx([3**0.5, 50**0.5, 7.0])
    assert {norm.dtype for norm in norms} == {torch.float32}
