"""Loaders: torch's DataLoader, fed with planned batches."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import multiprocessing
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from multiprocessing.synchronize import Semaphore
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from pipeline.components.position import reads_position, show_position
from pipeline.distributed.collectives import collectives_refused
from pipeline.errors import PipelineError
from pipeline.experiment.pymodules.definitions import Batch, LoaderArguments
from pipeline.system.logging import LOGGER
from pipeline.system.seeding import seed_generators
from pipeline.system.stop_requests import die_with_parent, ignore_stop_signals
from pipeline.training.batch_points import PlannedBatch

# A forked worker starts within milliseconds. This is for machines with far more processes than cores.
SECONDS_TO_START = 20.0
_SECONDS_BEFORE_FORK = 0.01
_MAX_STARTS = 3
_FORK = "fork"
# What an author's dataset returns: of any type.
Point = Any
Loaded = TypeVar("Loaded")


class LoadedBatch(NamedTuple):
    """A batch, and what count_items of its module transform returned for it."""

    batch: Batch
    counts: Any = None


def count_nothing(batch: Batch) -> None:
    """Count the items of no register."""


class KeyedDataset(Dataset[LoadedBatch]):
    """Turns a planned batch into a collated one, with generators seeded for each batch.

    Points, transforms and the collate function of a batch draw one after another from the streams of its key.
    Which points share a batch depends on neither processes nor workers, so what a point looks like does not either.
    """

    def __init__(
        self,
        dataset: Dataset[Point],
        transform: Callable[[Point], Point],
        collate: Callable[[list[Point]], Batch],
        count: Callable[[Batch], Any] = count_nothing,
    ) -> None:
        self._dataset = dataset
        self._transform = transform
        self._collate = collate
        self._count = count
        # Those of the two that read the position of a batch.
        self._readers = [component for component in (dataset, transform) if reads_position(component)]

    @property
    def reads_position(self) -> bool:
        return bool(self._readers)

    def __getitem__(self, planned: PlannedBatch) -> LoadedBatch:
        for component in self._readers:
            show_position(component, planned.position)
        seed_generators(*planned.key)
        with collectives_refused(f"datasets/{planned.dataset}.py, its data transform or its collate_fn"):
            fetch_many = getattr(self._dataset, "__getitems__", None)
            if fetch_many is not None:
                points: Iterable[Point] = fetch_many(list(planned.indices))
            else:
                points = map(self._dataset.__getitem__, planned.indices)
            transform = self._transform
            # A transform may edit the point in place and return nothing.
            batch = self._collate([point if (new := transform(point)) is None else new for point in points])
            # Here, because a worker has the time, and the batch is not on a device that would have to be waited for.
            return LoadedBatch(batch, self._count(batch))

    def __getitems__(self, planned: PlannedBatch) -> LoadedBatch:
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
        self._arguments = arguments
        self._pins_memory = pins_memory
        self._has_workers = False
        # Pymodules live under a private package that only a forked worker knows.
        self._context = arguments.multiprocessing_context or (_FORK if sys.platform == "linux" else None)
        # Counts the workers that have started. Only a fork can hang before it runs any Python.
        is_watched = arguments.num_workers > 0 and self._context == _FORK
        self._starts = multiprocessing.get_context(_FORK).Semaphore(0) if is_watched else None
        self._loader = self._create_loader()

    def _create_loader(self) -> DataLoader[LoadedBatch]:
        arguments = self._arguments
        workers: dict[str, Any] = {}
        if arguments.num_workers > 0:
            # torch's DataLoader refuses these without workers.
            workers = {
                "prefetch_factor": arguments.prefetch_factor,
                "persistent_workers": arguments.persistent_workers,
                "worker_init_fn": partial(_start_worker, starts=self._starts),
                "multiprocessing_context": self._context,
            }
        return DataLoader(
            self._dataset,
            batch_sampler=self._planned,  # type: ignore[arg-type]
            collate_fn=_keep,
            # Without a generator of its own, each iteration would draw from the global one.
            generator=torch.Generator(),
            pin_memory=self._pins_memory,
            timeout=arguments.timeout,
            num_workers=arguments.num_workers,
            **workers,
        )

    @property
    def reads_position(self) -> bool:
        """Return whether the dataset or its transform reads the position of its batch."""
        return self._dataset.reads_position

    def close(self) -> None:
        """End the workers, which torch's loader does when it goes."""
        del self._loader

    @property
    def starts_workers(self) -> bool:
        """Return whether loading begins with workers that are not there yet."""
        return self._loader.num_workers > 0 and not self._has_workers

    def load(self, batches: Iterable[PlannedBatch]) -> Iterator[LoadedBatch]:
        """Return the collated batches on the device; workers start now, not when the first batch is asked for.

        ``batches`` is iterated again if workers must be replaced.
        """
        self._planned.batches = batches
        if self._is_plain:
            # Without workers or pinned memory torch's loader has nothing to add but its own time.
            loaded: Iterator[LoadedBatch] = map(self._dataset.__getitem__, batches)
        elif self._starts is not None and self.starts_workers:
            loaded = self._start_workers(self._starts)
        else:
            loaded = iter(self._loader)
        self._has_workers = self._arguments.persistent_workers
        if self._device.type == "cpu":
            return loaded
        return (LoadedBatch(to_device(batch, self._device), counts) for batch, counts in loaded)

    def _start_workers(self, starts: Semaphore) -> Iterator[LoadedBatch]:
        """Fork the workers; replace them if one hangs in its fork.

        Python before 3.12 does not hold its lock of thread states over a fork. If a native thread has it at that
        instant, such as gloo's when it frees a tensor, the copy in the worker is never released: the worker hangs
        before it runs any Python, and the training process would wait for its batches for ever.
        """
        # The thread of a collective that has just ended gets the time to free its tensors.
        time.sleep(_SECONDS_BEFORE_FORK)
        for _ in range(_MAX_STARTS):
            others = set(multiprocessing.active_children())
            loaded = iter(self._loader)
            workers = set(multiprocessing.active_children()) - others
            deadline = time.monotonic() + SECONDS_TO_START
            if all(starts.acquire(timeout=max(0.0, deadline - time.monotonic())) for _ in workers):
                return loaded
            LOGGER.warning("A loader worker has not started within %g s; its loader is restarted.", SECONDS_TO_START)
            with _child_signals_ignored():
                for worker in workers:
                    # SIGTERM would wait in the hanging process for a Python that never runs.
                    worker.kill()
                    worker.join()
                # Persistent workers belong to torch's loader, others to the iterator.
                del loaded
                self._loader = self._create_loader()
            while starts.acquire(block=False):
                continue
        raise PipelineError(
            f"Loader workers must start within {SECONDS_TO_START:g} s, but one did not in {_MAX_STARTS} attempts.\n"
            "  fix: continue with --resume; if it happens again, set num_workers to 0 in dataloaders/*.py."
        )


class Prefetcher(Iterator[Loaded]):
    """An iterator that can load batches ahead; a loading error is raised when the batch is asked for.

    ``seconds`` is how long loading has taken in all.
    """

    def __init__(self, batches: Iterator[Loaded]) -> None:
        self._batches = batches
        self._loaded = deque[Loaded]()
        self._error: Exception | None = None
        self.seconds = 0.0

    def load(self, num_batches: int = 1) -> None:
        """Load the next batches, except those that are loaded already."""
        if len(self._loaded) < num_batches and self._error is None:
            started = time.perf_counter()
            try:
                self._loaded += itertools.islice(self._batches, num_batches - len(self._loaded))
            except Exception as error:
                self._error = error
            self.seconds += time.perf_counter() - started

    @property
    def loaded(self) -> list[Loaded]:
        """The batches that were loaded ahead."""
        return list(self._loaded)

    def look_ahead(self, num_batches: int) -> list[Loaded]:
        """Return the next batches, which stay there to be asked for."""
        self.load(num_batches)
        if len(self._loaded) < num_batches and self._error is not None:
            raise self._error
        # A batch of a later step may have been loaded ahead.
        return list(itertools.islice(self._loaded, num_batches))

    def __next__(self) -> Loaded:
        self.load()
        if self._loaded:
            return self._loaded.popleft()
        if self._error is not None:
            raise self._error
        raise StopIteration


@contextlib.contextmanager
def _child_signals_ignored() -> Iterator[None]:
    """Suspend torch's handler of SIGCHLD, which would raise for a worker that is killed on purpose."""
    # Blocking the signal would not do: another thread can receive it, and Python then runs the handler in this one.
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def _start_worker(number: int, starts: Semaphore | None) -> None:
    # Ctrl+C reaches the whole process group. Workers must live on, for the step that ends before the run stops.
    ignore_stop_signals()
    if sys.platform == "linux":
        die_with_parent()
    if starts is not None:
        starts.release()


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
