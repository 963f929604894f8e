"""What an experiment's pymodules define, as typed values."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from pipeline.components import (
    BaseCheckpointSaver,
    BaseDataCounter,
    BaseDataset,
    BaseEarlyStopper,
    BaseHook,
    BaseLossWeighter,
    BaseModuleTransform,
    BaseScheduler,
    BaseTracker,
)
from pipeline.components.datasets import DataPoint

# What an author's collate_fn makes of a list of points. Only the module transform knows its structure.
Batch = Any

# Base classes below stand for their contracts: an author's object need not inherit from them.


@dataclass(frozen=True)
class LoaderArguments:
    """How one split of a dataset is loaded."""

    batch_size: int = 32
    num_workers: int = 0
    prefetch_factor: int | None = None
    point_size: int = 1
    # None: pinned on accelerators, where copies from page-locked memory do not block.
    pin_memory: bool | None = None
    timeout: float = 0
    persistent_workers: bool = True
    multiprocessing_context: str | None = None

    @property
    def batch_items(self) -> int:
        return self.batch_size * self.point_size


@dataclass(frozen=True)
class DataLoading:
    train: LoaderArguments
    eval: LoaderArguments
    collate_fn: Callable[[list[DataPoint]], Batch] = default_collate


@dataclass(frozen=True)
class DataTransforms:
    train: Callable[[DataPoint], DataPoint | None]
    eval: Callable[[DataPoint], DataPoint | None]


@dataclass(frozen=True)
class DataCounter:
    counter: BaseDataCounter
    dataset_names: tuple[str, ...]


@dataclass(frozen=True)
class WeightSource:
    """Where initial weights come from and how their keys are renamed."""

    # A file anywhere, as settings name it.
    file: str | None = None
    ckp_name: str | None = None
    exp_name: str | None = None
    ckp_pool_name: str | None = None
    module_name: str | None = None
    strict: bool = True
    strip_prefix: str = ""
    key_map: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class AverageSettings:
    """How a module averages the weights of another one."""

    source: str
    # None: all updates count the same.
    decay: float | None = 0.999
    start_epoch: int = 1
    every_steps: int = 1
    # "instead" of the source, "beside" it in a second pass, or not at all.
    evaluate: str | None = "instead"
    update_bn: int = 0


@dataclass(frozen=True)
class ModuleDefinition:
    module: nn.Module
    frozen: bool = False
    compile: bool = False
    source: WeightSource | None = None
    shard: tuple[str, ...] | None = None
    average: AverageSettings | None = None
    # Commits leave out the parameters that need no gradient: every start loads them from where they came from.
    saves_trained_only: bool = False

    @property
    def is_trained(self) -> bool:
        return not self.frozen and self.average is None


@dataclass(frozen=True)
class MetricDefinition:
    """A metric of ours or of torchmetrics, and the registers of its values."""

    metric: Any
    names: tuple[str, ...]
    directions: Mapping[str, str]


def has_own_call(create: object) -> bool:
    """Return whether a class of module transforms defines ``__call__``; the base class has one that raises."""
    kinds = getattr(create, "__mro__", ())
    return any("__call__" in vars(kind) for kind in kinds if kind is not BaseModuleTransform)


@dataclass(frozen=True)
class ModuleTransformDefinition:
    create: Callable[[dict[str, BaseDataCounter], torch.device, logging.Logger], BaseModuleTransform]
    loss_registers: tuple[str, ...]
    # Names of metrics that evaluations feed.
    metrics: tuple[str, ...] = ()

    @property
    def counts_items(self) -> bool:
        """Return whether the data decides how many items a batch has."""
        return hasattr(self.create, "count_items")

    @cached_property
    def is_whole_step(self) -> bool:
        """Return whether its loss couples the rows of all batches of a step."""
        is_pair = all(callable(getattr(self.create, method, None)) for method in ("embed", "loss"))
        # Beside a __call__ of its own, they are helpers.
        return is_pair and not has_own_call(self.create)


@dataclass(frozen=True)
class OptimSched:
    create_optimizer: Callable[[dict[str, nn.Module]], Optimizer]
    create_scheduler: Callable[[Optimizer], BaseScheduler]
    scheduler_start_epoch: int = 1
    # The registers whose gradient it follows; None: all that are optimised.
    loss_registers: tuple[str, ...] | None = None
    every_steps: int = 1
    # In place of that of the settings.
    grad_clip_norm: float | None = None


@dataclass(frozen=True)
class Components:
    """All that an experiment's pymodules define, by name."""

    datasets: dict[str, BaseDataset]
    data_counters: dict[str, DataCounter]
    data_transforms: dict[str, DataTransforms]
    dataloaders: dict[str, DataLoading]
    modules: dict[str, ModuleDefinition]
    module_transforms: dict[str, ModuleTransformDefinition]
    optim_sched: dict[str, OptimSched]
    checkpoint_saver: BaseCheckpointSaver
    early_stopper: BaseEarlyStopper
    loss_weighter: BaseLossWeighter
    trackers: dict[str, BaseTracker] = field(default_factory=dict)
    metrics: dict[str, MetricDefinition] = field(default_factory=dict)
    hooks: dict[str, BaseHook] = field(default_factory=dict)

    @property
    def trained_modules(self) -> dict[str, nn.Module]:
        return {name: entry.module for name, entry in self.modules.items() if entry.is_trained}

    @property
    def frozen_modules(self) -> dict[str, nn.Module]:
        return {name: entry.module for name, entry in self.modules.items() if entry.frozen}

    @property
    def averages(self) -> dict[str, AverageSettings]:
        return {name: entry.average for name, entry in self.modules.items() if entry.average is not None}

    @property
    def changing_modules(self) -> dict[str, nn.Module]:
        """The modules whose weights change during training: those that are trained, and averages of them."""
        return {name: entry.module for name, entry in self.modules.items() if not entry.frozen}

    @property
    def all_modules(self) -> dict[str, nn.Module]:
        return {name: entry.module for name, entry in self.modules.items()}

    @property
    def evaluated_modules(self) -> dict[str, nn.Module]:
        """The modules as evaluations see them: averages that stand in for their source have its name, too."""
        instead = {
            settings.source: self.modules[name].module
            for name, settings in self.averages.items()
            if settings.evaluate == "instead"
        }
        return self.all_modules | instead
