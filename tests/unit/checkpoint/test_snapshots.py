"""Snapshots: what was taken stays as it was, whatever the training does next."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.checkpoint.snapshots import Snapshots
from pipeline.errors import PipelineError


class Owner:
    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state


def written(snapshots: Snapshots, owner: Any, meanwhile: Any = None) -> Any:
    """Take a snapshot, let something happen, write it and read it back."""
    writer, _ = snapshots.take("module m", owner)
    if meanwhile:
        meanwhile()
    file = io.BytesIO()
    writer(file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def test_snapshot_is_not_changed_by_what_comes_later() -> None:
    """Weights that are updated before the writer has come to them are written as they were."""
    module = nn.Linear(3, 2)
    before = module.weight.detach().clone()
    state = written(Snapshots(copies=True), module, lambda: module.weight.data.zero_())
    assert torch.equal(state["weight"], before)


def test_without_copies_the_state_is_live() -> None:
    """A caller that writes at once needs no second copy in memory."""
    module = nn.Linear(3, 2)
    state = written(Snapshots(copies=False), module, lambda: module.weight.data.zero_())
    assert not state["weight"].any()


def test_buffers_are_used_again() -> None:
    """The second snapshot goes into the memory of the first."""
    snapshots, module = Snapshots(copies=True), nn.Linear(3, 2)
    snapshots.take("module m", module)
    places = {name: buffer.data_ptr() for name, buffer in snapshots._buffers.items()}
    module.weight.data.add_(1)
    state = written(snapshots, module)
    assert {name: buffer.data_ptr() for name, buffer in snapshots._buffers.items()} == places
    assert torch.equal(state["weight"], module.weight)


def test_state_that_changes_its_shape_gets_new_memory() -> None:
    """Optimizers gain state with their first step, and other owners may do so at any time."""
    snapshots = Snapshots(copies=True)
    assert torch.equal(written(snapshots, Owner({"x": torch.ones(2)}))["x"], torch.ones(2))
    assert torch.equal(written(snapshots, Owner({"x": torch.ones(3)}))["x"], torch.ones(3))
    assert written(snapshots, Owner({"x": torch.ones(3).double()}))["x"].dtype == torch.float64


def test_tied_weights_stay_tied() -> None:
    """One tensor under two names is copied and written once."""
    module = nn.Sequential(nn.Linear(50, 50, bias=False), nn.Linear(50, 50, bias=False))
    module[1].weight = module[0].weight
    state = written(Snapshots(copies=True), module)
    assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr()


def test_versions_of_layers_are_kept() -> None:
    """What hangs on a state dict besides its items is written too."""
    state = written(Snapshots(copies=True), nn.Sequential(nn.BatchNorm1d(2)))
    assert isinstance(state, OrderedDict)
    assert state._metadata["0"]["version"] == 2  # type: ignore[attr-defined]


def test_optimizer_comes_back_whole() -> None:
    """Nested dicts, lists and numbers are all there."""
    module = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = written(Snapshots(copies=True), optimizer, optimizer.step)
    assert float(state["state"][0]["step"]) == 1
    assert state["param_groups"][0]["betas"] == (0.9, 0.999)


def test_views_and_strides_survive() -> None:
    """Tensors that do not own their memory, or lie in it in another order, keep their values."""
    base = torch.arange(12.0).reshape(3, 4)
    state = written(Snapshots(copies=True), Owner({"t": base.T, "row": base[1], "wide": torch.ones(1).expand(5)}))
    assert torch.equal(state["t"], base.T)
    assert torch.equal(state["row"], base[1])
    assert torch.equal(state["wide"], torch.ones(5))


def test_values_that_would_not_load_again_are_refused() -> None:
    """What a safe load refuses is refused when it is saved."""
    with pytest.raises(PipelineError, match=r"module m must hold tensors .*, but \['lr'\] \(float64\) would not load"):
        Snapshots(copies=True).take("module m", Owner({"lr": np.float64(0.1)}))


def test_size_is_known_before_anything_is_written() -> None:
    """The space that a commit needs is the sum of its tensors."""
    assert Snapshots(copies=True).take("module m", nn.Linear(3, 2))[1] == 4 * (6 + 2)


def test_equal_strings_give_equal_bytes_whether_they_are_one_object_or_two() -> None:
    """A value that was loaded is another object than one that was made; files must not show that."""
    shared = "mode"
    states = [{"a": shared, "b": shared}, {"a": "".join(["mo", "de"]), "b": "".join(["m", "ode"])}]
    files = []
    for state in states:
        writer, _ = Snapshots(copies=True).take("optimizer o", Owner(state))
        files.append(io.BytesIO())
        writer(files[-1])
    assert files[0].getvalue() == files[1].getvalue()
