"""Compiled modules: what a module computes must not depend on the inputs it has met before."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pipeline.errors import PipelineError

MAX_KINDS_OF_INPUT = 64


def compile_module(module: nn.Module, name: str) -> None:
    """Let a module's calls be compiled, for each kind of input (shapes, training or evaluation) on its own.

    Left to itself, torch compiles the first shape it meets for that shape alone, the second for all shapes, and runs
    what comes after eight kinds uncompiled: a resumed process meets shapes in another order and would round
    otherwise. Nor may kernels be chosen by how fast they were just now.
    """
    # Only here: loading the compiler takes as long as loading torch.
    from torch._dynamo import config
    from torch._dynamo.exc import FailOnRecompileLimitHit

    config.fail_on_recompile_limit_hit = True
    # Counted over all modules; each has a limit of its own.
    config.accumulated_recompile_limit = 1 << 16
    # Inside DDP, dynamo would split graphs at bucket borders. Only a rank's last batch of a step runs inside DDP, so
    # that the batch met first would decide what is compiled.
    config.optimize_ddp = False

    def forward(*inputs: Any, **named_inputs: Any) -> Any:
        """A frame of our own: torch passes over calls of its own classes, such as nn.Sequential, without a word."""
        return module._call_impl(*inputs, **named_inputs)

    compiled = torch.compile(  # type: ignore[call-overload]  # its types lag behind its arguments
        forward,
        dynamic=False,
        recompile_limit=MAX_KINDS_OF_INPUT,
        isolate_recompiles=True,
        options={"deterministic": True},
    )

    def call(*inputs: Any, **named_inputs: Any) -> Any:
        try:
            return compiled(*inputs, **named_inputs)
        except FailOnRecompileLimitHit as error:
            raise PipelineError(_too_many(name)) from error

    module._compiled_call_impl = call


def _too_many(name: str) -> str:
    return (
        f"modules/{name}.py: a module that is compiled must meet at most {MAX_KINDS_OF_INPUT} kinds of input (shapes, "
        "types, training or evaluation), but met another: each is compiled on its own, so that a resume is exact.\n"
        "  fix: bring its inputs to few shapes, or set compile to False. TORCH_LOGS=recompiles shows what differs."
    )
