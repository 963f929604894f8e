"""Buffers evolve by the step, whatever batches a rank has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipeline.runtime.processes import Processes
from pipeline.stages.buffers import StepBuffers, kept_buffers
from pipeline.stages.sums import PlainSums, TreeSums


class Remembering(nn.Module):
    """Has a running value, a counter and something that is not part of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(2))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.running: torch.Tensor
        self.count: torch.Tensor
        self.cache: torch.Tensor

    def see(self, value: float) -> None:
        # One buffer is replaced and the other is changed in place, as modules do both.
        self.running = self.running * 0.5 + value
        self.count += 1
        self.cache = torch.full((3,), value)


def new_buffers(module: nn.Module, sums: Any = TreeSums) -> StepBuffers:
    return StepBuffers([module], Processes(), lambda like: sums(like, Processes()))


def test_first_batch_to_change_a_buffer_decides() -> None:
    """Each batch starts from the step's start, and of several changes the first stays."""
    module = Remembering()
    buffers, original = new_buffers(module), module.running
    buffers.begin_step(3)
    buffers.after_batch(0)
    for position, value in ((1, 4.0), (2, 9.0)):
        module.see(value)
        buffers.after_batch(position)
        assert module.running.tolist() == [0.0, 0.0]
        assert module.count == 0
    buffers.end_step(skipped=False)
    assert module.running.tolist() == [4.0, 4.0]
    assert module.count == 1
    assert module.running is original


def test_skipped_step_leaves_no_trace() -> None:
    """Nothing that a step's batches did to buffers stays when the step is skipped."""
    module = nn.Sequential(Remembering(), nn.BatchNorm1d(2))
    buffers = new_buffers(module)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    buffers.begin_step(1)
    module[0].see(1.0)  # type: ignore[operator]
    module[1](torch.randn(4, 2))
    buffers.after_batch(0)
    buffers.end_step(skipped=True)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("sums", [PlainSums, TreeSums])
def test_batchnorm_takes_the_mean_over_the_batches_that_used_it(sums: Any) -> None:
    """Two of three batches use the layer: its statistics move by the mean of their changes, its count by two."""
    layer = nn.BatchNorm1d(1)
    buffers = new_buffers(layer, sums)
    buffers.begin_step(3)
    for position, mean in enumerate((1.0, None, 3.0)):
        if mean is not None:
            layer(torch.tensor([[mean - 1], [mean + 1]]))
        buffers.after_batch(position)
    buffers.end_step(skipped=False)
    assert layer.running_mean is not None
    assert layer.num_batches_tracked is not None
    torch.testing.assert_close(layer.running_mean, torch.tensor([0.1 * 2.0]))
    assert layer.num_batches_tracked.item() == 2


def test_kept_buffers_come_back() -> None:
    """Inside the block a module may do what it wants to its buffers."""
    module = Remembering()
    with kept_buffers([module]):
        module.see(3.0)
    assert module.running.tolist() == [0.0, 0.0]
    assert module.count == 0
    assert module.cache.tolist() == [0.0]
