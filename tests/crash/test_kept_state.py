"""State beside the weights: precision, averages in buffers and frozen layers survive a kill to the last bit."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from pipeline.store.compare import first_difference, read_any
from tests.support.experiments import write_experiment
from tests.support.faults import CountingDisk, Killed, KillingDisk
from tests.support.running import run_inside

RESULTS = Path("experiment_results/tiny")
# The trunk keeps a moving average of its weights in a buffer and uses it in evaluation.
AVERAGED = """
    import torch
    from torch import nn


    class Averaged(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm, self.drop = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.2)
            self.register_buffer("average", self.linear.weight.detach().clone())
            self.register_buffer("num_updates", torch.zeros((), dtype=torch.int64))

        def forward(self, inputs):
            if not self.training:
                return self.norm(nn.functional.linear(inputs, self.average)).relu()
            with torch.no_grad():
                self.average.lerp_(self.linear.weight, 0.1)
                self.num_updates += 1
            return self.drop(self.norm(self.linear(inputs)).relu())


    module = Averaged()
    settings = {}
"""
# Losses this large overflow fp16 gradients, so that the scale really changes.
LOUD = """
    from pipeline.components import StaticLossWeighter

    loss_weighter = StaticLossWeighter({"loss_a": 8.0, "loss_b": 8.0})
"""


def killed_and_resumed(folder: Path, files: dict[str, str | None], **training: object) -> Path:
    """Kill a run inside three of its writes, resume it each time, compare its end, and return its home."""
    whole, killed = folder / "whole", folder / "killed"
    for home in (whole, killed):
        write_experiment(home, files=files, training={"seed": 9, "checkpoint_every_steps": 1, **training})
    disk = CountingDisk()
    assert run_inside(whole, disk=disk).is_finished
    for share in (0.2, 0.25, 0.3):
        with pytest.raises(Killed):
            run_inside(killed, "--auto", disk=KillingDisk(int(len(disk.operations) * share), "torn"))
        gc.collect()
    assert run_inside(killed, "--resume").is_finished
    assert first_difference(whole / RESULTS / "data", killed / RESULTS / "data") is None
    return killed


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_average_in_buffers_is_resumed_exactly(tmp_path: Path, precision: str) -> None:
    """A moving average of the weights that lives in buffers goes on from where it was."""
    home = killed_and_resumed(tmp_path, {"pymodules/modules/trunk.py": AVERAGED}, precision=precision)
    trunk = read_any(home / RESULTS / "data/module_ckps/last/trunk.pt")
    # Three epochs of five steps: buffers move by the step, however many batches it has.
    assert int(trunk["num_updates"]) == 15
    assert not torch.equal(trunk["average"], trunk["linear.weight"])


def test_scale_of_fp16_gradients_is_resumed_exactly(tmp_path: Path) -> None:
    """Steps that overflow lower the scale; a resumed run neither repeats nor forgets that."""
    home = killed_and_resumed(tmp_path, {"pymodules/loss_weighter.py": LOUD}, precision="fp16")
    skipped = read_any(home / RESULTS / "data/loss_reg_data/train/loss_a/step_data_2.npz")["skipped"]
    assert skipped.any()
    assert not skipped.all()


def test_frozen_layers_are_resumed_exactly(tmp_path: Path) -> None:
    """A frozen module with BatchNorm and dropout is, to the end, what it was at the start."""
    home = killed_and_resumed(tmp_path, {})
    stem = read_any(home / RESULTS / "data/module_ckps/frzn/stem.pt")
    assert int(stem["1.num_batches_tracked"]) == 0
