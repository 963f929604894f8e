"""Loaders: torch's DataLoader, fed with planned batches."""

from __future__ import annotations

import inspect
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset

from pipeline.distributed.collectives import collectives_refused
from pipeline.experiment.pymodules.definitions import LoaderArguments
from pipeline.system.seeding import seed_generators
from pipeline.system.stop_requests import die_with_parent, ignore_stop_signals
from pipeline.training.step_plan import PlannedBatch


class KeyedDataset(Dataset[Any]):
    """Turns a planned batch into a collated one, with generators seeded for each batch.

    Points, transforms and the collate function of a batch draw one after another from the streams of its key.
    Which points share a batch depends on neither processes nor workers, so what a point looks like does not either.
    """

    def __init__(self, dataset: Any, transform: Callable[[Any], Any], collate: Callable[[list[Any]], Any]) -> None:
        self._dataset = dataset
        self._transform = transform
        self._collate = collate

    def __getitem__(self, planned: PlannedBatch) -> Any:
        seed_generators(*planned.key)
        transform = self._transform
        with collectives_refused(f"datasets/{planned.dataset}.py, its data transform or its collate_fn"):
            # A transform may edit the point in place and return nothing.
            return self._collate(
                [point if (new := transform(point)) is None else new for point in self._points(planned)]
            )

    def __getitems__(self, planned: PlannedBatch) -> Any:
        """Called by torch's fetcher with whatever the batch sampler yields."""
        return self[planned]

    def _points(self, planned: PlannedBatch) -> Iterable[Any]:
        fetch_many = getattr(self._dataset, "__getitems__", None)
        if fetch_many is not None:
            return cast(Iterable[Any], fetch_many(list(planned.indices)))
        return map(self._dataset.__getitem__, planned.indices)


class _Requests:
    """A batch sampler whose content is replaced each epoch, so that workers can live on."""

    def __init__(self) -> None:
        self.batches: Iterable[PlannedBatch] = ()

    def __iter__(self) -> Iterator[PlannedBatch]:
        return iter(self.batches)


class Loader:
    """Loads the batches of one split of one dataset, in the planned order."""

    def __init__(self, dataset: KeyedDataset, arguments: LoaderArguments, device: torch.device) -> None:
        self._dataset = dataset
        self._requests = _Requests()
        self._device = device
        # On a CPU nothing is copied, and torch would warn.
        pins_memory = device.type != "cpu" and arguments.pin_memory is not False
        self._is_plain = arguments.num_workers == 0 and not pins_memory
        self._keeps_workers = arguments.persistent_workers
        self._has_workers = False
        self._loader = DataLoader(
            dataset,
            batch_sampler=self._requests,  # type: ignore[arg-type]
            collate_fn=_as_it_is,
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

    def load(self, batches: Iterable[PlannedBatch]) -> Iterator[Any]:
        """Return the collated batches on the device; workers start now, not when the first batch is asked for."""
        self._requests.batches = batches
        self._has_workers = self._keeps_workers
        # Without workers or pinned memory torch's loader has nothing to add but its own time.
        loaded = map(self._dataset.__getitem__, batches) if self._is_plain else iter(self._loader)
        return loaded if self._device.type == "cpu" else (to_device(batch, self._device) for batch in loaded)


class Prefetcher(Iterator[Any]):
    """Batches of which one can be loaded before it is asked for; what goes wrong then is raised when it is.

    ``seconds`` is how long loading has taken in all.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._loaded = list[Any]()
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

    def __next__(self) -> Any:
        self.load()
        if self._error is not None:
            raise self._error
        if not self._loaded:
            raise StopIteration
        return self._loaded.pop()


def _worker_arguments(arguments: LoaderArguments) -> dict[str, Any]:
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
    ignore_stop_signals()
    if sys.platform == "linux":
        die_with_parent()


def _as_it_is(batch: Any) -> Any:
    return batch


def _takes_non_blocking(to: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(to).parameters.values()
    except ValueError:
        # The method of torch's own tensors has no signature.
        return True
    return any(one.name == "non_blocking" or one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor in nested mappings, lists and tuples, and every object that can move itself."""
    # Also PackedSequence, a tuple of which a part must stay on the CPU.
    if callable(getattr(batch, "to", None)):
        return batch.to(device, non_blocking=True) if _takes_non_blocking(batch.to) else batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
