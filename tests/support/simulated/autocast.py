"""Autocast on the simulated device: the operators that CUDA runs in lower precision, and those it keeps in float32."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.support.simulated.memory import NAME, is_simulated
from tests.support.simulated.operators import Operator, operator_of

_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
_LOWER_PRECISION = ("linear", "mm", "addmm", "matmul", "bmm", "baddbmm", "conv1d", "conv2d", "conv3d", "_convolution")
_FLOAT32 = (
    "softmax.int",
    "log_softmax.int",
    "nll_loss",
    "cross_entropy_loss",
    "layer_norm",
    "mse_loss",
    "exp",
    "log",
    "pow.Tensor_Scalar",
    "sum",
    "sum.dim_IntList",
)


def _cast(op: Operator, dtype: torch.dtype | None, *arguments: Any, **named: Any) -> Any:
    wanted = dtype or torch.get_autocast_dtype(NAME)

    def cast(value: torch.Tensor) -> torch.Tensor:
        is_usual = is_simulated(value) and value.is_floating_point() and value.dtype != torch.float64
        return value.to(wanted) if is_usual else value

    with torch._C._ExcludeDispatchKeyGuard(_KEY):
        arguments, named = pytree.tree_map_only(torch.Tensor, cast, (arguments, named))
        return op(*arguments, **named)


def register(kernels: torch.library.Library, fallbacks: torch.library.Library) -> None:
    fallbacks.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for dtype, names in ((None, _LOWER_PRECISION), (torch.float32, _FLOAT32)):
        for name in names:
            kernels.impl(name, functools.partial(_cast, operator_of(name), dtype), "AutocastPrivateUse1")
