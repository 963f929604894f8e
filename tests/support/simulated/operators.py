"""Operators of the simulated device: the CPU's own kernels, launched into the queue."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.support.simulated.memory import (
    NAME,
    allocate,
    allocate_like,
    as_bytes,
    host_view,
    is_pinned,
    is_simulated,
    new_storage,
    pin,
    place,
    refuse_second_device,
    spoil,
)
from tests.support.simulated.queue import QUEUE, plain_execution

aten = torch.ops.aten
_KEY = "PrivateUse1"
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
# Views only change sizes, strides and offsets: the CPU's own functions do, and nothing is launched.
_VIEWS = (
    "as_strided",
    "view",
    "_reshape_alias",
    "unfold",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
    "view_as_real",
    "view_as_complex",
)
# Indices may lie on the host.
_TAKE_HOST_TENSORS = {"index", "index_put_", "_index_put_impl_", "index_put", "_unsafe_index"}
# Implemented here, or for which the composite function is right.
_NOT_FORWARDED = ("is_pinned", "_pin_memory", "empty_like", "_to_copy", "copy_")
GENERATOR = torch._C.Generator()
Operator = Any


def operator_of(name: str) -> Operator:
    base, _, overload = name.partition(".")
    return getattr(getattr(aten, base), overload or "default")


@dataclass(frozen=True)
class Signature:
    """What the schema of an operator says about launching it."""

    is_mutable: bool
    # For each return value, the argument that it is.
    aliases: tuple[tuple[int, str, bool] | None, ...]
    returns_tensors: bool
    takes_generator: bool
    is_random: bool
    # Sizes of results depend on values, so that the host must wait for them.
    is_dynamic: bool


@functools.cache
def signature_of(op: Operator) -> Signature:
    schema = op._schema
    aliases: list[tuple[int, str, bool] | None] = []
    for returned in schema.returns:
        aliases.append(None)
        for index, argument in enumerate(schema.arguments):
            infos = returned.alias_info, argument.alias_info
            if all(infos) and infos[0].before_set == infos[1].before_set:
                aliases[-1] = (index, argument.name, argument.kwarg_only)
    return Signature(
        schema.is_mutable,
        tuple(aliases),
        all(str(returned.type) in ("Tensor", "List[Tensor]") for returned in schema.returns),
        any(argument.name == "generator" for argument in schema.arguments),
        torch.Tag.nondeterministic_seeded in op.tags,
        torch.Tag.dynamic_output_shape in op.tags,
    )


def call_on_host(op: Operator, arguments: Any, named: dict[str, Any]) -> Any:
    """Call an operator of the CPU; what it draws comes from the device's generator."""
    signature = signature_of(op)
    if not signature.is_random or (signature.takes_generator and named.get("generator") is not None):
        return op(*arguments, **named)
    if signature.takes_generator:
        return op(*arguments, **{**named, "generator": GENERATOR})
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(GENERATOR.get_state())
    try:
        return op(*arguments, **named)
    finally:
        GENERATOR.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(before)


def _as_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _as_zeros(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cpu").zero_()
    if isinstance(value, torch._C.Generator):
        return torch._C.Generator()
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _as_host(value: Any) -> Any:
    if is_simulated(value):
        return host_view(value)
    # A tensor of the host may change before the command runs.
    if isinstance(value, torch.Tensor):
        return value.clone()
    return torch.device("cpu") if isinstance(value, torch.device) else value


_RESULTS: dict[Any, Any] = {}


def _results_like(op: Operator, flat: list[Any], spec: Any) -> Any:
    """Return tensors without values like those that an operator will return: one run on zeros tells, and is kept.

    Functions for the meta device would give other strides for some inputs than the CPU's kernels.
    """
    described = (
        (value.shape, value.stride(), value.dtype) if isinstance(value, torch.Tensor) else str(value) for value in flat
    )
    key = (op, str(spec), tuple(described))
    if key not in _RESULTS:
        state = GENERATOR.get_state()
        arguments, named = pytree.tree_unflatten([_as_zeros(value) for value in flat], spec)
        try:
            results = call_on_host(op, arguments, {**named, **_unpinned(named)})
        except (RuntimeError, IndexError):
            # Zeros may be refused where the true values are not, such as class indices; a wrong shape is refused here.
            arguments, named = pytree.tree_unflatten([_as_meta(value) for value in flat], spec)
            results = op(*arguments, **{**named, **_unpinned(named)})
        finally:
            GENERATOR.set_state(state)
        _RESULTS[key] = pytree.tree_map_only(torch.Tensor, _as_meta, results)
    return _RESULTS[key]


def _unpinned(named: dict[str, Any]) -> dict[str, Any]:
    return {"pin_memory": False} if named.get("pin_memory") else {}


def launch(op: Operator, *arguments: Any, **named: Any) -> Any:
    """Launch any operator, and return its results, which are there once the queue has come so far."""
    signature, name = signature_of(op), op._schema.name.removeprefix("aten::")
    with plain_execution():
        flat, spec = pytree.tree_flatten((arguments, named))
        if name not in _TAKE_HOST_TENSORS:
            _refuse_other_devices(op, flat)
        _resize_outputs(op, named, flat, spec)
        host_arguments, host_named = pytree.tree_unflatten([_as_host(value) for value in flat], spec)
        host_named |= _unpinned(host_named)
        if signature.is_mutable and None not in signature.aliases:
            QUEUE.launch(functools.partial(call_on_host, op, host_arguments, host_named), name)
            changed = [named[key] if is_named else arguments[index] for index, key, is_named in signature.aliases]
            return changed[0] if len(changed) == 1 else tuple(changed) if changed else None
        if signature.returns_tensors and not signature.is_dynamic:
            likes, result_spec = pytree.tree_flatten(_results_like(op, flat, spec))
            results = [allocate_like(like) if isinstance(like, torch.Tensor) else like for like in likes]
            places = [host_view(result) if is_simulated(result) else None for result in results]
            QUEUE.launch(functools.partial(_call_into, op, host_arguments, host_named, places), name)
            return pytree.tree_unflatten(results, result_spec)
        QUEUE.kernels[name] += 1
        QUEUE.wait(name)
        return pytree.tree_map_only(torch.Tensor, _to_device, call_on_host(op, host_arguments, host_named))


def _refuse_other_devices(op: Operator, flat: list[Any]) -> None:
    for value in flat:
        if isinstance(value, torch.Tensor) and not is_simulated(value) and value.dim() > 0:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{NAME}:0 and {value.device}! ({op})"
            )


def _resize_outputs(op: Operator, named: dict[str, Any], flat: list[Any], spec: Any) -> None:
    """Give empty tensors that are handed in for results the size that the results will have."""
    written = {
        one.name for one in op._schema.arguments if one.kwarg_only and one.alias_info and one.alias_info.is_write
    }
    empty = [name for name in written if is_simulated(named.get(name)) and named[name].numel() == 0]
    if empty:
        arguments, outputs = pytree.tree_unflatten([_as_meta(value) for value in flat], spec)
        op(*arguments, **outputs)
        for name in empty:
            if outputs[name].numel():
                named[name].resize_(outputs[name].size())


def _call_into(op: Operator, arguments: Any, named: dict[str, Any], places: list[torch.Tensor | None]) -> None:
    results = pytree.tree_leaves(call_on_host(op, arguments, named))
    for target, result in zip(places, results, strict=True):
        if target is not None and result is not None:
            target.copy_(result)


def _to_device(value: torch.Tensor) -> torch.Tensor:
    result = allocate_like(value)
    host_view(result).copy_(value)
    return result


def empty(
    size: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    refuse_second_device(device.index if device else None)
    with plain_execution():
        like = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format or torch.contiguous_format)
        return allocate_like(like)


def empty_strided(
    size: Any, stride: Any, *, dtype: torch.dtype | None = None, layout: Any = None, device: Any = None, **named: Any
) -> torch.Tensor:
    refuse_second_device(device.index if device else None)
    with plain_execution():
        return allocate(size, stride, dtype or torch.get_default_dtype())


def set_storage(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    return place(tensor, storage, 0, [storage.nbytes() // tensor.element_size()], [1])


def resize(tensor: torch.Tensor, size: Any, memory_format: torch.memory_format | None = None) -> torch.Tensor:
    with plain_execution():
        like = torch.empty(size, device="meta")
        storage: Any = tensor.untyped_storage()
        if storage.nbytes() < like.numel() * tensor.element_size():
            larger = new_storage(like.numel() * tensor.element_size())
            if storage.nbytes():
                kept = as_bytes(larger.host)[: storage.nbytes()]
                QUEUE.launch(functools.partial(kept.copy_, as_bytes(storage.host)), "resize_")
            storage = larger
        return place(tensor, storage, 0, list(size), like.stride())


def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy within the device, or between it and the host.

    Only page-locked memory of the host can be copied while the host goes on. It is read or written when the queue
    comes to the copy: until then, a source may still be changed by mistake, and a target holds garbage.
    """
    with plain_execution():
        if is_simulated(source) and is_simulated(target):
            QUEUE.launch(functools.partial(host_view(target).copy_, host_view(source)), "copy")
        elif is_simulated(target):
            QUEUE.launch(functools.partial(host_view(target).copy_, source), "copy_to_device")
            if not (non_blocking and is_pinned(source)):
                QUEUE.wait("copy to the device")
        else:
            if non_blocking and is_pinned(target):
                spoil(target)
                QUEUE.launch(functools.partial(target.copy_, host_view(source)), "copy_to_host")
            else:
                QUEUE.launch(functools.partial(target.copy_, host_view(source)), "copy_to_host")
                QUEUE.wait("copy to the host")
        return target


def copy_from_and_resize(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return copy_from(source, target)


def to_copy(
    tensor: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: Any = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    with plain_execution():
        like = aten._to_copy.default(
            _as_meta(tensor), dtype=dtype, device=torch.device("meta"), memory_format=memory_format
        )
        if device is not None and device.type == "cpu":
            result = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="cpu")
            # torch page-locks what it allocates for such a copy.
            result = pin(result) if non_blocking else result
        else:
            result = allocate_like(like)
        return copy_from(tensor, result, non_blocking)


def pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    with plain_execution():
        return pin(tensor.clone())


def tensor_is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    return is_pinned(tensor)


def convolution(*arguments: Any) -> Any:
    return launch(aten.convolution.default, *arguments)


def convolution_backward(
    gradient: torch.Tensor,
    inputs: torch.Tensor,
    weight: torch.Tensor,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    mask: Any,
) -> Any:
    bias_size = [weight.shape[1] * groups if transposed else weight.shape[0]]
    shape = (stride, padding, dilation, transposed, output_padding, groups, mask)
    return launch(aten.convolution_backward.default, gradient, inputs, weight, bias_size, *shape)


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Choose the function that the CPU would choose, so that bits are the same."""
    if query.dim() == 4 and dropout_p == 0 and not enable_gqa:
        return aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def batch_norm_stats(inputs: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """SyncBatchNorm has kernels of its own, which the CPU lacks; here they are made of other operators."""
    others = [dim for dim in range(inputs.dim()) if dim != 1]
    variance, mean = torch.var_mean(inputs.float(), others, correction=0)
    return mean, torch.rsqrt(variance + eps)


def batch_norm_gather_stats_with_counts(
    inputs: torch.Tensor,
    means: torch.Tensor,
    inverse_deviations: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    eps: float,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    weights = (counts / counts.sum()).unsqueeze(1)
    mean = (weights * means).sum(0)
    variance = (weights * (inverse_deviations**-2 - eps + (means - mean) ** 2)).sum(0)
    if running_mean is not None and running_var is not None:
        running_mean.mul_(1 - momentum).add_(momentum * mean)
        running_var.mul_(1 - momentum).add_(momentum * variance * counts.sum() / (counts.sum() - 1))
    return mean, torch.rsqrt(variance + eps)


def _per_channel(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))


def batch_norm_elemt(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor,
    inverse_deviation: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    scale = _per_channel(inverse_deviation * weight, inputs)
    return (inputs - _per_channel(mean, inputs)) * scale + _per_channel(bias, inputs)


def batch_norm_backward_reduce(
    gradient: torch.Tensor,
    inputs: torch.Tensor,
    mean: torch.Tensor,
    inverse_deviation: torch.Tensor,
    weight: torch.Tensor,
    *needed: bool,
) -> tuple[torch.Tensor, ...]:
    others = [dim for dim in range(inputs.dim()) if dim != 1]
    total = gradient.sum(others)
    product = (gradient * (inputs - _per_channel(mean, inputs))).sum(others)
    return total, product, product * inverse_deviation, total


def batch_norm_backward_elemt(
    gradient: torch.Tensor,
    inputs: torch.Tensor,
    mean: torch.Tensor,
    inverse_deviation: torch.Tensor,
    weight: torch.Tensor,
    total: torch.Tensor,
    product: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    count = counts.sum()
    centred = inputs - _per_channel(mean, inputs)
    from_mean = _per_channel(total / count, inputs)
    from_variance = centred * _per_channel(product / count * inverse_deviation**2, inputs)
    return (gradient - from_mean - from_variance) * _per_channel(inverse_deviation * weight, inputs)


_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "empty.memory_format": empty,
    "empty_strided": empty_strided,
    "set_.source_Storage": set_storage,
    "resize_": resize,
    "_copy_from": copy_from,
    "_copy_from_and_resize": copy_from_and_resize,
    "_to_copy": to_copy,
    "convolution_overrideable": convolution,
    "convolution_backward_overrideable": convolution_backward,
    "scaled_dot_product_attention": scaled_dot_product_attention,
    "batch_norm_stats": batch_norm_stats,
    "batch_norm_gather_stats_with_counts": batch_norm_gather_stats_with_counts,
    "batch_norm_elemt": batch_norm_elemt,
    "batch_norm_backward_reduce": batch_norm_backward_reduce,
    "batch_norm_backward_elemt": batch_norm_backward_elemt,
}


def _redispatch_to_cpu(op: Operator, *arguments: Any, **named: Any) -> Any:
    return op.redispatch(_CPU, *arguments, **named)


def _forwarded_names(library_names: list[str]) -> list[str]:
    """Return operators whose composite function would be chosen before a launch.

    For some, the CPU's kernel has other bits than the composite function. Operators on lists of tensors are one kernel
    on a device, whereas the composite function calls one for each tensor.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = []
    for qualified in library_names:
        name = qualified.removeprefix("aten::")
        if name == qualified or name.partition(".")[0] in _NOT_FORWARDED or has_kernel(qualified, _KEY):
            continue
        has_choice = has_kernel(qualified, "CPU") or name.startswith("_foreach_")
        if has_choice and has_kernel(qualified, "CompositeExplicitAutograd"):
            returns = operator_of(name)._schema.returns
            if not any(returned.alias_info and not returned.alias_info.is_write for returned in returns):
                names.append(name)
    return names


def register(kernels: torch.library.Library, fallbacks: torch.library.Library) -> None:
    """Register all operators; both libraries must be kept."""
    fallbacks.fallback(launch, _KEY)
    for name, function in _IMPLEMENTATIONS.items():
        kernels.impl(name, function, _KEY)
    kernels.impl("scaled_dot_product_attention", scaled_dot_product_attention, "AutogradPrivateUse1")
    for name in _VIEWS:
        kernels.impl(name, functools.partial(_redispatch_to_cpu, operator_of(name)), _KEY)
    kernels.impl("is_pinned", tensor_is_pinned, "CPU")
    kernels.impl("_pin_memory", pin_memory, "CPU")
    for name in _forwarded_names(torch._C._dispatch_get_all_op_names()):
        kernels.impl(name, functools.partial(launch, operator_of(name)), _KEY)
