"""Averages of weights: modules that follow others after every update, such as an EMA or SWA."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipeline.errors import PipelineError
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
        self._experiment = experiment
        # Hooks may add groups, and with them owners.
        self._num_groups = -1
        self._owners: dict[str, frozenset[str]] = {}

    def begin(self) -> None:
        """Begin again as copies of the sources, which hooks may have changed before the first step."""
        for follower in self._followers.values():
            follower.begin()

    def _update_owners(self) -> None:
        """Find the optimizers that update the source of each average, if there are groups that were not there."""
        num_groups = sum(len(optimizer.param_groups) for optimizer in self._experiment.optimizers.values())
        if num_groups != self._num_groups:
            self._num_groups = num_groups
            averages = self._experiment.components.averages.items()
            self._owners = {name: self._find_owners(settings) for name, settings in averages}

    def _find_owners(self, settings: AverageSettings) -> frozenset[str]:
        """Return the optimizers that update the source of an average."""
        own = set(map(id, self._experiment.components.all_modules[settings.source].parameters()))
        return frozenset(
            name
            for name, optimizer in self._experiment.optimizers.items()
            if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
        )

    def after_update(self, stepped: Collection[str], epoch: int) -> None:
        """Let every average follow whose source was updated by one of the optimizers that have stepped."""
        if not self._followers:
            return
        self._update_owners()
        for name, follower in self._followers.items():
            # While an owner has only begun its step, its weights are not where they will be.
            owners = (self._experiment.optimizers[owner] for owner in self._owners[name])
            is_complete = not any(getattr(owner, "is_between_turns", False) for owner in owners)
            if is_complete and not self._owners[name].isdisjoint(stepped):
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
        self.begin()

    def begin(self) -> None:
        """Become a copy of the source."""
        _copy([*self._parameters(), *self._buffers()])

    def _parameters(self) -> list[_Pair]:
        pairs = zip(self._average.parameters(), self._source.parameters(), strict=True)
        return [(_local(average), _local(source)) for average, source in pairs]

    def _buffers(self) -> Iterator[_Pair]:
        """Yield the saved buffers, once those are put in place that the source has and the average has not.

        They are looked up each time: a module may replace a buffer by another tensor, also of another shape.
        """
        for average, source in zip(self._average.modules(), self._source.modules(), strict=True):
            for name, buffer in source._buffers.items():
                if name in source._non_persistent_buffers_set:
                    continue
                own = average._buffers.get(name)
                if buffer is None or own is None or own.shape != buffer.shape or own.dtype != buffer.dtype:
                    average._buffers[name] = None if buffer is None else buffer.detach().clone()
                else:
                    yield _local(own), _local(buffer)

    @torch.no_grad()
    def follow(self, epoch: int) -> None:
        """Take an update of the source into account."""
        if epoch < self._settings.start_epoch:
            _copy([*self._parameters(), *self._buffers()])
            return
        self.num_updates += 1
        if self.num_updates % self._settings.every_steps:
            return
        parameters = self._parameters()
        averaged = [pair for pair in parameters if pair[0].is_floating_point()]
        if averaged:
            averages, sources = (list(tensors) for tensors in zip(*averaged, strict=True))
            torch._foreach_lerp_(averages, sources, 1 - self._decay())
        _copy([*(pair for pair in parameters if not pair[0].is_floating_point()), *self._buffers()])

    def _decay(self) -> float:
        """Return how much of the average is kept at this update."""
        number = self.num_updates // self._settings.every_steps
        if self._settings.decay is None:
            # All count the same: the average of the first is the first itself.
            return (number - 1) / number
        return min(self._settings.decay, (1 + number) / (_WARMUP + number))


@torch.no_grad()
def _copy(pairs: list[_Pair]) -> None:
    """Copy the source of each pair into its average."""
    if pairs:
        targets, sources = zip(*pairs, strict=True)
        torch._foreach_copy_(list(targets), list(sources))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor."""
    local: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return local.detach()


def update_batchnorm(experiment: Experiment, runner: BatchRunner, plan: StepPlan, epoch: int) -> None:
    """Compute the BatchNorm statistics of averages that ask for it, over the first training batches of an epoch.

    The statistics of a mean of weights are not the mean of their statistics. Every rank runs the same batches, so that
    the result does not depend on their number.
    """
    # What runs beside the average must be in the mode in which it will be evaluated.
    experiment.set_training(False)
    for name, settings in experiment.components.averages.items():
        layers = [
            layer
            for layer in experiment.components.all_modules[name].modules()
            if isinstance(layer, _BatchNorm) and layer.running_mean is not None
        ]
        if not settings.update_bn or not layers:
            continue
        refs = _first_batches(plan, max(1, epoch), settings.update_bn)
        points = runner.points(max(1, epoch))
        runner.position = plan.position_after(epoch)
        others = [module for other, module in experiment.components.all_modules.items() if other != name]
        momenta = [layer.momentum for layer in layers]
        with torch.no_grad(), preserved_buffers(others), runner.average_swapped(name):
            for layer in layers:
                layer.reset_running_stats()
                # None: the mean over all batches.
                layer.momentum = None
                layer.train()
            for loaded, ref in zip(runner.load(refs, points), refs, strict=True):
                runner.run_modules(loaded, ref, (*points.batch(ref).key, "update_bn"))
            for layer, momentum in zip(layers, momenta, strict=True):
                layer.momentum = momentum
                layer.eval()
            if not all(int(layer.num_batches_tracked or 0) for layer in layers):
                # All ranks have run the same batches.
                raise PipelineError(
                    f"update_bn of modules/{name}.py must reach all of its BatchNorm layers, but none of the first "
                    f"{settings.update_bn} training batches uses some of them.\n  fix: raise update_bn, or set it to 0."
                ).shared()


def _first_batches(plan: StepPlan, epoch: int, num_batches: int) -> list[BatchRef]:
    refs: list[BatchRef] = []
    for index in range(plan.num_steps):
        if len(refs) >= num_batches:
            break
        refs += plan.step(epoch, index)
    return refs[:num_batches]
