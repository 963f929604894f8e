"""Weights that all report, in time, whatever a batch uses."""

from __future__ import annotations

import torch
from torch import nn

from pipeline.training.engines.ddp import touch_first


def test_weights_report_while_the_backward_pass_goes_on() -> None:
    """A weight that is touched and used reports before the layer below it has run, in every pass."""
    first, last, unused = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    weights, order = [first.weight, last.weight, unused.weight], list[str]()
    touched = touch_first(weights)
    for name, weight in zip(("first", "last", "unused"), weights, strict=True):
        accumulator = torch.autograd.graph.get_gradient_edge(weight).node
        accumulator.register_hook(lambda _, __, name=name: order.append(name))  # type: ignore[misc]
    for _ in range(2):
        hidden = first(torch.ones(1, 2))
        hidden.register_hook(lambda gradient: order.append("hidden"))
        torch.autograd.backward([last(hidden).sum(), touched], [torch.ones(()), torch.ones(())])
    assert order == ["unused", "last", "hidden", "first"] * 2
    assert unused.weight.grad is None
