"""Compiled modules: what a module computes must not depend on the inputs it has met before."""

from __future__ import annotations

import torch
from torch import nn

from pipeline.errors import PipelineError

MAX_KINDS_OF_INPUT = 64


def compile_module(module: nn.Module, name: str) -> None:
    """Compile the calls of a module, separately for each kind of input (shapes, training or evaluation).

    By default, torch compiles the first shape it meets for that shape alone, the second for all shapes, and runs
    what comes after eight kinds uncompiled. A resumed process meets shapes in another order and would round
    differently.
    """
    # Imported only here: loading the compiler takes as long as loading torch.
    from torch._dynamo import config
    from torch._dynamo.exc import FailOnRecompileLimitHit
    from torch._functorch import config as functorch_config

    # Optimizers that follow different registers take several backward passes through one graph.
    functorch_config.donated_buffer = False
    config.fail_on_recompile_limit_hit = True
    # This limit counts over all modules; recompile_limit below is the limit of each.
    config.accumulated_recompile_limit = 1 << 16
    # A safeguard: in a forward pass inside DDP, dynamo would split graphs at bucket borders.
    config.optimize_ddp = False

    def forward(*inputs: object, **named_inputs: object) -> object:
        # A frame of our own: torch silently does not compile calls of its own classes, such as nn.Sequential.
        return module._call_impl(*inputs, **named_inputs)

    compiled = torch.compile(  # type: ignore[call-overload]  # its types lag behind its arguments
        forward,
        dynamic=False,
        recompile_limit=MAX_KINDS_OF_INPUT,
        isolate_recompiles=True,
        # Kernels must not be chosen by how fast they were in a trial.
        options={"deterministic": True},
    )

    def call(*inputs: object, **named_inputs: object) -> object:
        try:
            return compiled(*inputs, **named_inputs)
        except FailOnRecompileLimitHit as error:
            raise PipelineError(
                f"modules/{name}.py: a module that is compiled must meet at most {MAX_KINDS_OF_INPUT} kinds of input "
                "(shapes, types, training or evaluation), but met another: each is compiled on its own, so that a "
                "resume is exact.\n  fix: bring its inputs to few shapes, or set compile to False. "
                "TORCH_LOGS=recompiles shows what differs."
            ) from error

    module._compiled_call_impl = call
