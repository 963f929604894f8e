"""Loaders: torch's DataLoader, fed with planned batches."""

from __future__ import annotations

import inspect
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from pipeline.distributed.collectives import collectives_refused
from pipeline.experiment.pymodules.definitions import Batch, LoaderArguments
from pipeline.system.seeding import seed_generators
from pipeline.system.stop_requests import die_with_parent, ignore_stop_signals
from pipeline.training.step_plan import PlannedBatch

# What an author's dataset returns: of any type.
Point = Any


class KeyedDataset(Dataset[Batch]):
    """Turns a planned batch into a collated one, with generators seeded for each batch.

    Points, transforms and the collate function of a batch draw one after another from the streams of its key.
    Which points share a batch depends on neither processes nor workers, so what a point looks like does not either.
    """

    def __init__(
        self, dataset: Dataset[Point], transform: Callable[[Point], Point], collate: Callable[[list[Point]], Batch]
    ) -> None:
        self._dataset = dataset
        self._transform = transform
        self._collate = collate

    def __getitem__(self, planned: PlannedBatch) -> Batch:
        seed_generators(*planned.key)
        with collectives_refused(f"datasets/{planned.dataset}.py, its data transform or its collate_fn"):
            fetch_many = getattr(self._dataset, "__getitems__", None)
            if fetch_many is not None:
                points: Iterable[Point] = fetch_many(list(planned.indices))
            else:
                points = map(self._dataset.__getitem__, planned.indices)
            transform = self._transform
            # A transform may edit the point in place and return nothing.
            return self._collate([point if (new := transform(point)) is None else new for point in points])

    def __getitems__(self, planned: PlannedBatch) -> Batch:
        """Called by torch's fetcher with whatever the batch sampler yields."""
        return self[planned]


class _PlannedBatches:
    """A batch sampler whose content is replaced each epoch, so that workers can live on."""

    def __init__(self) -> None:
        self.batches: Iterable[PlannedBatch] = ()

    def __iter__(self) -> Iterator[PlannedBatch]:
        return iter(self.batches)


class Loader:
    """Loads the batches of one split of one dataset, in the planned order."""

    def __init__(self, dataset: KeyedDataset, arguments: LoaderArguments, device: torch.device) -> None:
        self._dataset = dataset
        self._planned = _PlannedBatches()
        self._device = device
        # On a CPU nothing is copied, and torch would warn.
        pins_memory = device.type != "cpu" and arguments.pin_memory is not False
        self._is_plain = arguments.num_workers == 0 and not pins_memory
        self._keeps_workers = arguments.persistent_workers
        self._has_workers = False
        self._loader = DataLoader(
            dataset,
            batch_sampler=self._planned,  # type: ignore[arg-type]
            collate_fn=_keep,
            # Without a generator of its own, each iteration would draw from the global one.
            generator=torch.Generator(),
            pin_memory=pins_memory,
            timeout=arguments.timeout,
            num_workers=arguments.num_workers,
            **_worker_arguments(arguments),
        )

    def close(self) -> None:
        """End the workers, which torch's loader does when it goes."""
        del self._loader

    @property
    def starts_workers(self) -> bool:
        """Return whether loading begins with workers that are not there yet."""
        return self._loader.num_workers > 0 and not self._has_workers

    def load(self, batches: Iterable[PlannedBatch]) -> Iterator[Batch]:
        """Return the collated batches on the device; workers start now, not when the first batch is asked for."""
        self._planned.batches = batches
        self._has_workers = self._keeps_workers
        # Without workers or pinned memory torch's loader has nothing to add but its own time.
        loaded = map(self._dataset.__getitem__, batches) if self._is_plain else iter(self._loader)
        return loaded if self._device.type == "cpu" else (to_device(batch, self._device) for batch in loaded)


class Prefetcher(Iterator[Batch]):
    """Batches of which one can be loaded before it is asked for; an error of loading is raised when it is asked for.

    ``seconds`` is how long loading has taken in all.
    """

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self._loaded = list[Batch]()
        self._error: Exception | None = None
        self.seconds = 0.0

    def load(self) -> None:
        """Load the next batch, unless that was done already."""
        if not self._loaded and self._error is None:
            started = time.perf_counter()
            try:
                self._loaded += itertools.islice(self._batches, 1)
            except Exception as error:
                self._error = error
            self.seconds += time.perf_counter() - started

    def __next__(self) -> Batch:
        self.load()
        if self._error is not None:
            raise self._error
        if not self._loaded:
            raise StopIteration
        return self._loaded.pop()


def _worker_arguments(arguments: LoaderArguments) -> dict[str, Any]:
    """Return the arguments that torch's DataLoader refuses without workers."""
    if arguments.num_workers == 0:
        return {}
    return {
        "prefetch_factor": arguments.prefetch_factor,
        "persistent_workers": arguments.persistent_workers,
        "worker_init_fn": _start_worker,
        # Pymodules live under a private package that only a forked worker knows.
        "multiprocessing_context": arguments.multiprocessing_context or ("fork" if sys.platform == "linux" else None),
    }


def _start_worker(number: int) -> None:
    # Ctrl+C reaches the whole process group. Workers must live on, for the step that ends before the run stops.
    ignore_stop_signals()
    if sys.platform == "linux":
        die_with_parent()


def _keep(batch: Batch) -> Batch:
    """Collate nothing: the dataset returns whole batches. A function of a module, because workers may pickle it."""
    return batch


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move every tensor in nested mappings, lists and tuples, and every object that can move itself."""
    # Also PackedSequence, a tuple of which a part must stay on the CPU.
    if callable(getattr(batch, "to", None)):
        try:
            parameters = inspect.signature(batch.to).parameters.values()
            is_known = any(known.name == "non_blocking" or known.kind is known.VAR_KEYWORD for known in parameters)
        except ValueError:
            # The method of torch's own tensors has no signature.
            is_known = True
        return batch.to(device, non_blocking=True) if is_known else batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
