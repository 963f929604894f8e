"""Buffers evolve by the step, whatever batches a rank has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.distributed.processes import Processes
from pipeline.errors import PipelineError
from pipeline.training.buffers import StepBuffers, preserved_buffers
from pipeline.training.engines.reduction import PlainSums, TreeSums
from pipeline.training.step_plan import BatchAssignment, BatchRef, SplitShape


class Operations(TorchDispatchMode):
    """Notes the operations that tensors are used in."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


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


def assignment(position: int, dataset: str = "points") -> BatchAssignment:
    return BatchAssignment(position, BatchRef(SplitShape(dataset, num_points=8, batch_size=2, point_size=1), position))


def new_buffers(module: nn.Module, sums: Any = TreeSums) -> StepBuffers:
    return StepBuffers({"net": module}, Processes(), sums)


def test_first_batch_to_change_a_buffer_decides() -> None:
    """Each batch starts from the step's start, and of several changes the first stays."""
    module = Remembering()
    buffers, original = new_buffers(module), module.running
    buffers.begin_step(3)
    buffers.after_batch(assignment(0))
    for position, value in ((1, 4.0), (2, 9.0)):
        module.see(value)
        buffers.after_batch(assignment(position))
        assert module.running.tolist() == [0.0, 0.0]
        assert module.count == 0
    buffers.end_step(skipped=False)
    assert module.running.tolist() == [4.0, 4.0]
    assert module.count == 1
    assert module.running is original


def test_batch_that_writes_nothing_decides_nothing() -> None:
    """A dataset that does not use a module must not keep its buffers from moving, however they are written."""
    module = Remembering()
    buffers = new_buffers(module)
    for _ in range(2):
        buffers.begin_step(3)
        buffers.after_batch(assignment(0, "other"))
        for position in (1, 2):
            # Writes through .data do not show in the tensor's version.
            module.running.data.add_(position)
            buffers.after_batch(assignment(position))
        buffers.end_step(skipped=False)
    assert module.running.tolist() == [2.0, 2.0]


def test_constant_buffers_are_copied_once() -> None:
    """Masks and indices cost nothing from the second step on."""
    module = nn.Module()
    module.register_buffer("mask", torch.ones(3))
    buffers = new_buffers(module)
    buffers.begin_step(1)
    buffers.after_batch(assignment(0))
    with Operations() as seen:
        buffers.begin_step(1)
        buffers.after_batch(assignment(0))
    assert seen.names == []


def test_buffer_that_changes_its_shape_is_refused() -> None:
    """The message names file and buffer, and says what to do."""
    module = nn.Sequential(nn.Module())
    module[0].register_buffer("bank", torch.zeros(0, 2))
    buffers = new_buffers(module)
    buffers.begin_step(1)
    module[0].bank = torch.ones(4, 2)
    expected = r"modules/net.py: buffer '0.bank' must keep its shape .* from \(0, 2\) .* to \(4, 2\)"
    with pytest.raises(PipelineError, match=expected):
        buffers.after_batch(assignment(0))


def test_skipped_step_leaves_no_trace() -> None:
    """Nothing that a step's batches did to buffers stays when the step is skipped."""
    module = nn.Sequential(Remembering(), nn.BatchNorm1d(2))
    buffers = new_buffers(module)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    buffers.begin_step(1)
    module[0].see(1.0)  # type: ignore[operator]
    module[1](torch.randn(4, 2))
    buffers.after_batch(assignment(0))
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
        buffers.after_batch(assignment(position))
    buffers.end_step(skipped=False)
    assert layer.running_mean is not None
    assert layer.num_batches_tracked is not None
    torch.testing.assert_close(layer.running_mean, torch.tensor([0.1 * 2.0]))
    assert layer.num_batches_tracked.item() == 2


def test_kept_buffers_come_back() -> None:
    """Inside the block a module may do what it wants to its buffers."""
    module = Remembering()
    with preserved_buffers([module]):
        module.see(3.0)
    assert module.running.tolist() == [0.0, 0.0]
    assert module.count == 0
    assert module.cache.tolist() == [0.0]
