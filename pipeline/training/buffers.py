"""Buffers: what modules remember besides their weights must not depend on the number of processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipeline.distributed.processes import Processes
from pipeline.errors import PipelineError
from pipeline.experiment.gradient_flags import GradientFlags
from pipeline.training.engines.reduction import BatchSums
from pipeline.training.step_plan import BatchAssignment

# Larger than any position of a batch in a step.
_NO_BATCH = 1 << 62


class StepBuffers:
    """Lets buffers evolve by the step: every batch starts from what they were when the step began.

    A skipped step leaves no trace.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        processes: Processes,
        sums: type[BatchSums],
    ) -> None:
        # A layer that two modules share has its buffers once.
        layers = dict.fromkeys(layer for module in modules.values() for layer in module.modules())
        by_dtype: dict[torch.dtype, list[_BatchNorm]] = {}
        for layer in layers:
            if isinstance(layer, _BatchNorm) and layer.running_mean is not None:
                by_dtype.setdefault(layer.running_mean.dtype, []).append(layer)
        statistics = [BatchNormStatistics(same, processes, sums) for same in by_dtype.values()]
        others = OtherBuffers(modules, [tensor for rule in statistics for tensor in rule.tensors], processes)
        self._rules: list[BatchNormStatistics | OtherBuffers] = [*statistics, *([others] if others.has_any else [])]

    def begin_step(self, num_batches: int) -> None:
        for rule in self._rules:
            rule.begin_step(num_batches)

    def after_batch(self, assignment: BatchAssignment) -> None:
        """Set aside what one batch has changed, and go back to the step's start."""
        for rule in self._rules:
            rule.after_batch(assignment)

    def end_step(self, *, skipped: bool) -> None:
        """Bring in what the batches of all ranks have changed."""
        for rule in self._rules if not skipped else ():
            rule.end_step()


class BatchNormStatistics:
    """Running statistics of BatchNorm layers: after a step each layer takes the mean over the batches that used it.

    All layers are computed with as one flat tensor: a model may have hundreds, and each kernel costs a launch.
    """

    def __init__(self, layers: list[_BatchNorm], processes: Processes, sums: type[BatchSums]) -> None:
        self._averages: list[torch.Tensor] = []
        self._counts: list[torch.Tensor] = []
        for layer in layers:
            self._averages += [layer.running_mean, layer.running_var]  # type: ignore[list-item]
            self._counts.append(layer.num_batches_tracked)  # type: ignore[arg-type]
        # Two averages of each layer lie behind each other in the flat tensor.
        numbers = [number for number, layer in enumerate(layers) for _ in range(2 * layer.num_features)]
        self._layer_of_element = torch.tensor(numbers, device=self._counts[0].device)
        self._sums = sums(self._read(), processes)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The buffers that evolve by this rule."""
        return [*self._averages, *self._counts]

    def _read(self) -> list[torch.Tensor]:
        """Return all averages and all counts, each as one tensor."""
        return [torch.cat([tensor.view(-1) for tensor in tensors]) for tensors in (self._averages, self._counts)]

    def _write(self, averages: torch.Tensor, counts: torch.Tensor) -> None:
        for tensors, values in ((self._averages, averages), (self._counts, counts)):
            parts = values.split([tensor.numel() for tensor in tensors])
            torch._foreach_copy_(tensors, [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])

    def begin_step(self, num_batches: int) -> None:
        self._start = self._read()
        self._sums.begin(num_batches)

    def after_batch(self, assignment: BatchAssignment) -> None:
        # A batch moves an average by momentum; the step takes the mean of these moves.
        self._sums.add([now - start for now, start in zip(self._read(), self._start, strict=True)])
        self._write(*self._start)

    def end_step(self) -> None:
        averages, counts = self._start
        change, num_batches = self._sums.total()
        assert change is not None
        assert num_batches is not None
        # A layer that no batch has used has changed by nothing.
        share = change / num_batches.clamp(min=1)[self._layer_of_element]
        self._write(averages + share, counts + num_batches)


class OtherBuffers:
    """All other buffers of a module's state: each takes the value that the first batch to write it gave it.

    Writes are found without looking at values, for which the host would have to wait: by the tensor's version, or by
    another tensor in its place. Writes through ``.data`` leave the version alone. So the first batch of each dataset
    that a process runs is compared by value. Buffers that it changed this way are treated as written by every batch of
    that dataset.

    Buffers that are not part of the state are left alone: a resumed run would not find them again.
    """

    def __init__(self, modules: Mapping[str, nn.Module], known: list[torch.Tensor], processes: Processes) -> None:
        self._processes = processes
        ids = {id(tensor) for tensor in known}
        self._places: list[tuple[nn.Module, str]] = []
        self._names: list[str] = []
        seen: set[nn.Module] = set()
        for module_name, module in modules.items():
            for path, layer in module.named_modules():
                if layer in seen:
                    continue
                seen.add(layer)
                for name, buffer in layer._buffers.items():
                    if buffer is not None and id(buffer) not in ids and name not in layer._non_persistent_buffers_set:
                        self._places.append((layer, name))
                        self._names.append(f"modules/{module_name}.py: buffer {f'{path}.{name}'.lstrip('.')!r}")
        # A copy of each buffer, and the tensor and version of which it is one.
        self._values: list[torch.Tensor] = [torch.empty(0)] * len(self._places)
        self._start: list[torch.Tensor] = list(self._values)
        self._versions = [-1] * len(self._places)
        self._hidden_writes: dict[str, set[int]] = {}
        self._ever_written: set[int] = set()

    @property
    def has_any(self) -> bool:
        return bool(self._places)

    def _tensors(self) -> list[torch.Tensor]:
        """Return the buffers as they are now: a module may have replaced one by another tensor."""
        return [layer._buffers[name] for layer, name in self._places]  # type: ignore[misc]

    def _find_written(self, tensors: list[torch.Tensor]) -> set[int]:
        """Return which buffers are other tensors than at the step's start, or were written to since."""
        return {
            index
            for index, tensor in enumerate(tensors)
            if tensor is not self._start[index] or tensor._version != self._versions[index]
        }

    def begin_step(self, num_batches: int) -> None:
        tensors = self._tensors()
        # Buffers that are constant are copied once.
        for index in self._find_written(tensors) | self._ever_written:
            self._values[index] = tensors[index].clone()
            self._start[index] = tensors[index]
            self._versions[index] = tensors[index]._version
        self._changes: dict[int, tuple[int, torch.Tensor]] = {}

    def after_batch(self, assignment: BatchAssignment) -> None:
        now = self._tensors()
        written = self._find_written(now)
        dataset = assignment.ref.shape.dataset
        if dataset not in self._hidden_writes:
            self._hidden_writes[dataset] = self._find_hidden_writes(now, written)
        written |= self._hidden_writes[dataset]
        self._ever_written |= written
        for index in written:
            before = self._values[index]
            if now[index].shape != before.shape or now[index].dtype != before.dtype:
                raise PipelineError(
                    f"{self._names[index]} must keep its shape and type, but a batch has changed it from "
                    f"{tuple(before.shape)} {before.dtype} to {tuple(now[index].shape)} {now[index].dtype}: ranks "
                    "could not exchange it, nor could a resumed run load it.\n"
                    "  fix: register it with its final shape and fill it step by step, or with persistent=False."
                )
            # Of several batches of this rank, the first one counts.
            self._changes.setdefault(
                index, (assignment.position, now[index].clone(memory_format=torch.contiguous_format))
            )
            # Back to the step's start, as the same tensor: an author's code may hold a reference to it.
            layer, name = self._places[index]
            layer._buffers[name] = self._start[index].copy_(before)
            self._versions[index] = self._start[index]._version

    def _find_hidden_writes(self, now: list[torch.Tensor], written: set[int]) -> set[int]:
        """Return buffers that have other values, though nothing says that they were written to; the host waits."""
        indices = [index for index in range(len(now)) if index not in written]
        if not indices:
            return set()
        differences = torch.stack([(now[index] != self._values[index]).any() for index in indices])
        return {index for index, differs in zip(indices, differences.tolist(), strict=True) if differs}

    def end_step(self) -> None:
        positions = [
            self._changes[index][0] if index in self._changes else _NO_BATCH for index in range(len(self._places))
        ]
        # The batch with the smallest position in the plan decides, whichever rank ran it.
        first = self._processes.all_reduce_min(torch.tensor(positions)).tolist()
        for index, position in enumerate(first):
            if position == _NO_BATCH:
                continue
            start = self._start[index]
            is_owner = position == positions[index]
            # Ranks add what lies in memory, which must be in the same order on all of them.
            nothing = torch.zeros_like(start, memory_format=torch.contiguous_format)
            value = self._changes[index][1] if is_owner else nothing
            # A sum of bytes of which all but one rank's are zero is that rank's value to the bit, whatever its type.
            self._processes.sum(value.view(torch.uint8) if value.dim() else value.view(1).view(torch.uint8))
            start.copy_(value)


def buffer_versions(modules: Mapping[str, nn.Module]) -> dict[str, tuple[int, int]]:
    """Return which tensor each buffer is, and its version: what is written to has others."""
    return {
        f"modules/{module_name}.py: buffer {name!r}": (id(buffer), buffer._version)
        for module_name, module in modules.items()
        for name, buffer in module.named_buffers()
    }


@contextmanager
def preserved_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore every buffer and every requires_grad flag at the end of the block."""
    modules = list(modules)
    flags = GradientFlags({str(index): module for index, module in enumerate(modules)})
    trained = flags.now()
    layers = [layer for module in modules for layer in module.modules()]
    # Both the tensors and their values: a forward pass may replace a buffer or write into it.
    before = [(layer, dict(layer._buffers)) for layer in layers if layer._buffers]
    values = [{name: buffer.clone() for name, buffer in buffers.items() if buffer is not None} for _, buffers in before]
    try:
        yield
    finally:
        flags.set(trained)
        for (layer, buffers), kept in zip(before, values, strict=True):
            layer._buffers.update(buffers)
            for name, value in kept.items():
                layer._buffers[name].copy_(value)  # type: ignore[union-attr]
