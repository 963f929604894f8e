"""Buffers: what modules remember beside their weights must not depend on the number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipeline.experiment.gradient_flags import GradientFlags
from pipeline.runtime.processes import Processes
from pipeline.stages.sums import BatchSums

_NO_BATCH = 1 << 62


class StepBuffers:
    """Lets buffers evolve by the step: every batch starts from what they were when the step began.

    A skipped step leaves no trace.
    """

    def __init__(
        self, modules: list[nn.Module], processes: Processes, new_sums: Callable[[list[torch.Tensor]], BatchSums]
    ) -> None:
        layers = list(dict.fromkeys(layer for module in modules for layer in module.modules()))
        statistics = BatchNormStatistics(layers, new_sums)
        others = OtherBuffers(layers, statistics.tensors, processes)
        self._rules = [rule for rule in (statistics, others) if rule.has_any]

    def begin_step(self, num_batches: int) -> None:
        for rule in self._rules:
            rule.begin_step(num_batches)

    def after_batch(self, position: int) -> None:
        """Set aside what one batch has changed, and go back to the step's start."""
        for rule in self._rules:
            rule.after_batch(position)

    def end_step(self, *, skipped: bool) -> None:
        """Bring in what the batches of all ranks have changed."""
        for rule in self._rules if not skipped else ():
            rule.end_step()


class BatchNormStatistics:
    """Running statistics of BatchNorm layers: after a step each layer takes the mean over the batches that used it."""

    def __init__(self, layers: list[nn.Module], new_sums: Callable[[list[torch.Tensor]], BatchSums]) -> None:
        found = [layer for layer in layers if isinstance(layer, _BatchNorm) and layer.running_mean is not None]
        averages = [one for layer in found for one in (layer.running_mean, layer.running_var)]
        self._averages: list[torch.Tensor] = averages  # type: ignore[assignment]
        self._counts: list[torch.Tensor] = [layer.num_batches_tracked for layer in found]  # type: ignore[misc]
        self._sums = new_sums(self.tensors)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The buffers that evolve by this rule."""
        return [*self._averages, *self._counts]

    @property
    def has_any(self) -> bool:
        return bool(self._averages)

    def begin_step(self, num_batches: int) -> None:
        self._start = [tensor.clone() for tensor in self.tensors]
        self._sums.begin(num_batches)

    def after_batch(self, position: int) -> None:
        self._sums.add([tensor - start for tensor, start in zip(self.tensors, self._start, strict=True)])
        torch._foreach_copy_(self.tensors, self._start)

    def end_step(self) -> None:
        changes = [change for change in self._sums.total() if change is not None]
        counts = changes[len(self._averages) :]
        for position, tensor in enumerate(self._averages):
            # A layer that no batch has used has changed by nothing.
            tensor.add_(changes[position] / counts[position // 2].clamp(min=1))
        torch._foreach_add_(self._counts, counts)


class OtherBuffers:
    """All other buffers of a module's state: each takes the value that the first batch to change it gave it.

    Buffers that are not part of the state are none of it: whatever a resumed run would not find again.
    """

    def __init__(self, layers: list[nn.Module], known: list[torch.Tensor], processes: Processes) -> None:
        self._processes, ids = processes, {id(tensor) for tensor in known}
        self._places = [
            (layer, name)
            for layer in layers
            for name, buffer in layer._buffers.items()
            if buffer is not None and id(buffer) not in ids and name not in layer._non_persistent_buffers_set
        ]

    @property
    def has_any(self) -> bool:
        return bool(self._places)

    def _tensors(self) -> list[torch.Tensor]:
        """Return the buffers as they are now: a module may have replaced one by another tensor."""
        return [layer._buffers[name] for layer, name in self._places]  # type: ignore[misc]

    def begin_step(self, num_batches: int) -> None:
        self._start, self._values = self._tensors(), [tensor.clone() for tensor in self._tensors()]
        self._changes: dict[int, tuple[int, torch.Tensor]] = {}

    def after_batch(self, position: int) -> None:
        now = self._tensors()
        differences = [(one != other).any() for one, other in zip(now, self._values, strict=True)]
        for index in torch.stack(differences).nonzero()[:, 0].tolist():
            self._changes.setdefault(index, (position, now[index].clone(memory_format=torch.contiguous_format)))
            layer, name = self._places[index]
            layer._buffers[name] = self._start[index].copy_(self._values[index])

    def end_step(self) -> None:
        own = [self._changes[index][0] if index in self._changes else _NO_BATCH for index in range(len(self._places))]
        first = self._processes.least(torch.tensor(own)).tolist()
        for index, position in enumerate(first):
            if position != _NO_BATCH:
                self._start[index].copy_(self._shared(index, is_owner=position == own[index]))

    def _shared(self, index: int, *, is_owner: bool) -> torch.Tensor:
        """Return the value of the one rank that has it, to the bit."""
        # Ranks add what lies in memory, which must be in the same order on all of them.
        nothing = torch.zeros_like(self._start[index], memory_format=torch.contiguous_format)
        value = self._changes[index][1] if is_owner else nothing
        self._processes.sum(value.view(torch.uint8) if value.dim() else value.view(1).view(torch.uint8))
        return value


@contextmanager
def kept_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Leave every buffer and every requires_grad flag as it was, whatever is done to it meanwhile."""
    modules = list(modules)
    flags = GradientFlags({str(index): module for index, module in enumerate(modules)})
    trained = flags.now()
    layers = [layer for module in modules for layer in module.modules()]
    before = [(layer, dict(layer._buffers)) for layer in layers if layer._buffers]
    values = [{name: one.clone() for name, one in buffers.items() if one is not None} for _, buffers in before]
    try:
        yield
    finally:
        flags.set(trained)
        for (layer, buffers), kept in zip(before, values, strict=True):
            layer._buffers.update(buffers)
            for name, value in kept.items():
                layer._buffers[name].copy_(value)  # type: ignore[union-attr]
