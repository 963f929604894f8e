"""Compiled modules."""

from __future__ import annotations

from torch import nn
from torch._dynamo import config

from pipeline.experiment.compilation import compile_module


def test_ddp_does_not_decide_what_is_compiled() -> None:
    """Only a rank's last batch of a step runs inside DDP; a resumed process may meet it first."""
    with config.patch(optimize_ddp=True):
        compile_module(nn.Linear(1, 1), "net")
        assert config.optimize_ddp is False
