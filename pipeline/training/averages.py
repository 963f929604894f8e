"""Averages of weights: modules that follow others after every update, such as an EMA or SWA."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipeline.experiment.assembly import Experiment
from pipeline.experiment.pymodules.definitions import AverageSettings
from pipeline.serialization.shard_index import is_sharded
from pipeline.training.batch_runner import BatchRunner
from pipeline.training.buffers import preserved_buffers
from pipeline.training.step_plan import BatchRef, StepPlan

# The first updates count more in an EMA, so that it does not stay near the initial weights: as in TensorFlow's.
_WARMUP = 10
# A tensor of an average, and that of its source.
_Pair = tuple[torch.Tensor, torch.Tensor]


class Averages:
    """All averages of an experiment, with the number of updates that each has seen.

    Weights are the same on every rank after an update, and so are their averages: nothing is exchanged. Of shards, each
    rank averages its own.
    """

    def __init__(self, experiment: Experiment) -> None:
        components = experiment.components
        self._followers = {
            name: _Follower(components.all_modules[settings.source], components.all_modules[name], settings)
            for name, settings in components.averages.items()
        }
        self._owners = {name: self._find_owners(experiment, settings) for name, settings in components.averages.items()}

    @staticmethod
    def _find_owners(experiment: Experiment, settings: AverageSettings) -> frozenset[str]:
        """Return the optimizers that update the source of an average."""
        own = set(map(id, experiment.components.all_modules[settings.source].parameters()))
        return frozenset(
            name
            for name, optimizer in experiment.optimizers.items()
            if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
        )

    def after_update(self, stepped: Collection[str], epoch: int) -> None:
        """Let every average follow whose source was updated by one of the optimizers that have stepped."""
        for name, follower in self._followers.items():
            if not self._owners[name].isdisjoint(stepped):
                follower.follow(epoch)

    def state(self) -> dict[str, int]:
        """Return how many updates each average has seen, for a commit; the weights are saved as modules."""
        return {name: follower.num_updates for name, follower in self._followers.items()}

    def load_state(self, state: dict[str, int]) -> None:
        for name, num_updates in state.items():
            self._followers[name].num_updates = num_updates


class _Follower:
    """One average; at the start it is a copy of its source."""

    def __init__(self, source: nn.Module, average: nn.Module, settings: AverageSettings) -> None:
        self._settings = settings
        self._source = source
        self._average = average
        self.num_updates = 0
        self._copy(self._all_tensors())

    # Tensors are looked up each time: a module may replace a buffer by another tensor.
    def _all_tensors(self) -> Iterator[_Pair]:
        yield from zip(_tensors_of(self._average), _tensors_of(self._source), strict=True)

    @torch.no_grad()
    def follow(self, epoch: int) -> None:
        """Take an update of the source into account."""
        if epoch < self._settings.start_epoch:
            self._copy(self._all_tensors())
            return
        self.num_updates += 1
        if self.num_updates % self._settings.every_steps:
            return
        parameters = set(map(id, self._average.parameters()))
        averaged: list[_Pair] = []
        copied: list[_Pair] = []
        for average, source in self._all_tensors():
            is_averaged = id(average) in parameters and average.is_floating_point()
            (averaged if is_averaged else copied).append((average, source))
        weight = 1 - self._decay()
        if averaged:
            averages, sources = (list(map(_local, tensors)) for tensors in zip(*averaged, strict=True))
            torch._foreach_lerp_(averages, sources, weight)
        self._copy(copied)

    def _decay(self) -> float:
        """Return how much of the average is kept at this update."""
        number = self.num_updates // self._settings.every_steps
        if self._settings.decay is None:
            # All count the same: the average of the first is the first itself.
            return (number - 1) / number
        return min(self._settings.decay, (1 + number) / (_WARMUP + number))

    @staticmethod
    @torch.no_grad()
    def _copy(pairs: Iterable[_Pair]) -> None:
        pairs = [(_local(average), _local(source)) for average, source in pairs]
        if pairs:
            targets, sources = zip(*pairs, strict=True)
            torch._foreach_copy_(list(targets), list(sources))


def _tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor."""
    local: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return local.detach()


def update_batchnorm(experiment: Experiment, runner: BatchRunner, plan: StepPlan, epoch: int) -> None:
    """Compute the BatchNorm statistics of averages that ask for it, over the first training batches of an epoch.

    The statistics of a mean of weights are not the mean of their statistics. Every rank runs the same batches, so that
    the result does not depend on their number.
    """
    for name, settings in experiment.components.averages.items():
        layers = [layer for layer in experiment.components.all_modules[name].modules() if isinstance(layer, _BatchNorm)]
        if not settings.update_bn or not layers:
            continue
        refs = _first_batches(plan, max(1, epoch), settings.update_bn)
        points = runner.points(max(1, epoch))
        others = [module for other, module in experiment.components.all_modules.items() if other != name]
        momenta = [layer.momentum for layer in layers]
        with torch.no_grad(), preserved_buffers(others), runner.average_swapped(name):
            for layer in layers:
                layer.reset_running_stats()
                # None: the mean over all batches.
                layer.momentum = None
                layer.train()
            for loaded, ref in zip(runner.load(refs, points), refs, strict=True):
                runner.bind("__call__", loaded, ref, (*points.batch(ref).key, "update_bn"))()
            for layer, momentum in zip(layers, momenta, strict=True):
                layer.momentum = momentum
                layer.eval()


def _first_batches(plan: StepPlan, epoch: int, num_batches: int) -> list[BatchRef]:
    refs: list[BatchRef] = []
    for index in range(plan.num_steps):
        if len(refs) >= num_batches:
            break
        refs += plan.step(epoch, index)
    return refs[:num_batches]
