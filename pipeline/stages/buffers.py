"""Buffers: what modules remember beside their weights must not depend on the number of processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipeline.runtime.processes import Processes


class BatchNormStatistics:
    """Running statistics of BatchNorm layers that evolve by the step, whichever rank sees which batch.

    Every batch of a step starts from the statistics at the step's start; after the step each layer takes the mean
    over the batches that used it. A skipped step leaves no trace.
    """

    def __init__(self, modules: list[nn.Module], processes: Processes) -> None:
        self._processes = processes
        found = (layer for module in modules for layer in module.modules())
        layers = [layer for layer in found if isinstance(layer, _BatchNorm) and layer.running_mean is not None]
        self._layers = list(dict.fromkeys(layers))
        self._averages = [one for layer in self._layers for one in (layer.running_mean, layer.running_var)]
        self._counts = [layer.num_batches_tracked for layer in self._layers]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The buffers that evolve by this rule."""
        return [*self._averages, *self._counts]  # type: ignore[list-item]

    def begin_step(self) -> None:
        if self._layers:
            self._start = [tensor.clone() for tensor in self.tensors]
            self._sums = [torch.zeros_like(tensor) for tensor in self.tensors]

    def after_batch(self) -> None:
        """Set aside what one batch has changed, and go back to the step's start."""
        if self._layers:
            for tensor, start, total in zip(self.tensors, self._start, self._sums, strict=True):
                total.add_(tensor - start)
                tensor.copy_(start)

    def end_step(self, *, skipped: bool) -> None:
        """Bring in the mean of what the batches of all ranks have changed."""
        if not self._layers or skipped:
            return
        flat = torch.cat([total.reshape(-1).to(torch.float64) for total in self._sums])
        self._processes.sum(flat)
        parts = flat.split([total.numel() for total in self._sums])
        counts = parts[len(self._averages) :]
        for position, (tensor, part) in enumerate(zip(self._averages, parts, strict=False)):
            # A layer that no batch has used has changed by nothing.
            change = part / counts[position // 2].clamp(min=1)
            tensor.add_(change.view_as(tensor).to(tensor.dtype))  # type: ignore[union-attr]
        for count, part in zip(self._counts, counts, strict=True):
            count.add_(part.view_as(count).to(count.dtype))  # type: ignore[union-attr]


class SharedBuffers:
    """All other buffers: every step starts from rank zero's, so that nothing depends on what a lost process saw."""

    def __init__(self, modules: list[nn.Module], statistics: BatchNormStatistics, processes: Processes) -> None:
        self._processes, self._modules = processes, modules
        self._known = {id(tensor) for tensor in statistics.tensors}
        self._has_any = bool(self._collect())

    def _collect(self) -> list[torch.Tensor]:
        """Return the buffers as they are now: a module may have replaced one by another tensor."""
        buffers = [buffer for module in self._modules for buffer in module.buffers() if id(buffer) not in self._known]
        # Wider types come first, so that every slice of the bytes is aligned for its type.
        return sorted(buffers, key=lambda buffer: -buffer.element_size())

    def share(self) -> None:
        if self._processes.world_size == 1 or not self._has_any:
            return
        buffers = self._collect()
        flat = torch.cat([buffer.detach().reshape(-1).view(torch.uint8) for buffer in buffers])
        self._processes.send_from_rank_zero(flat)
        sizes = [buffer.numel() * buffer.element_size() for buffer in buffers]
        for buffer, part in zip(buffers, flat.split(sizes), strict=True):
            buffer.detach().copy_(part.view(buffer.dtype).view_as(buffer))


@contextmanager
def kept_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Leave every buffer as it was, whatever is done to it meanwhile."""
    layers = [layer for module in modules for layer in module.modules()]
    before = [(layer, dict(layer._buffers)) for layer in layers if layer._buffers]
    values = [{name: one.clone() for name, one in buffers.items() if one is not None} for _, buffers in before]
    try:
        yield
    finally:
        for (layer, buffers), kept in zip(before, values, strict=True):
            layer._buffers.update(buffers)
            for name, value in kept.items():
                layer._buffers[name].copy_(value)  # type: ignore[union-attr]
