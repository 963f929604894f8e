"""From a loaded batch to its losses: the part training and evaluation share."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice, repeat
from typing import Any

import torch

from pipeline.components import BaseModuleTransform, Position
from pipeline.components.position import show_position
from pipeline.distributed.collectives import collectives_refused
from pipeline.distributed.processes import Processes
from pipeline.errors import BrokenContract, PipelineError, Problem
from pipeline.experiment.assembly import Experiment
from pipeline.experiment.pymodules.user_code import place_of
from pipeline.system.seeding import seed_generators
from pipeline.training.batch_points import EndlessPoints, EpochPoints, PlannedBatch, Points
from pipeline.training.buffers import buffer_versions, preserved_buffers
from pipeline.training.loaders import Batch, KeyedDataset, LoadedBatch, Loader, count_nothing
from pipeline.training.losses import Items, broken_count, check_losses, count_items
from pipeline.training.metrics import Arguments, check_arguments
from pipeline.training.rows import (
    RowKind,
    Rows,
    as_float32,
    broken_rows,
    check_rows,
    check_values,
    describe_kinds,
    kinds_of,
    row_bytes,
)
from pipeline.training.step_plan import BatchRef, SplitShape

_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
# What torch's allocators and the operating system say when memory ends.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory")
_MAX_SHOWN_TENSORS = 8

Key = tuple[int | str, ...]


class _Planned(Iterable[PlannedBatch]):
    """Batches planned one by one as a loader asks: the indices of a whole epoch would take memory."""

    def __init__(self, points: Points, refs: list[BatchRef], positions: list[Position]) -> None:
        self._points = points
        self._refs = refs
        # One for each batch, or none if nothing reads them.
        self._positions = positions

    def __iter__(self) -> Iterator[PlannedBatch]:
        planned = map(self._points.batch, self._refs)
        if not self._positions:
            return planned
        return (replace(batch, position=place) for batch, place in zip(planned, self._positions, strict=True))


class BatchRunner:
    """Loads the planned batches of one split and runs the module transforms on them.

    The train split is shuffled and augmented, unless it is to be evaluated like any other.
    """

    def __init__(
        self,
        experiment: Experiment,
        processes: Processes,
        split: str,
        *,
        evaluates: bool = False,
    ) -> None:
        self._experiment = experiment
        self._processes = processes
        self._split = split
        # Where the training stands; whoever runs batches says so.
        self.position = Position(0, 0, 0)
        self._trains = split == "train" and not evaluates
        self._shards_modules = experiment.settings.training.shards_modules
        components = experiment.components
        kind = "train" if self._trains else "eval"
        arguments = {name: getattr(loading, kind) for name, loading in components.dataloaders.items()}
        is_endless = self._trains and experiment.settings.steps_per_epoch is not None
        self.shapes = [
            SplitShape.of(name, experiment.splits[name][split], arguments[name], is_endless=is_endless)
            for name in components.datasets
        ]
        self._indices = {name: splits[split] for name, splits in experiment.splits.items()}
        # Passes span epochs, so their order is kept from one epoch to the next.
        self._endless = EndlessPoints(experiment.settings.training.seed, split, self._indices) if is_endless else None
        self._loaders = {
            name: Loader(
                KeyedDataset(
                    dataset,
                    getattr(components.data_transforms[name], kind),
                    components.dataloaders[name].collate_fn,
                    self._counter_of(name),
                ),
                arguments[name],
                processes.device,
            )
            for name, dataset in components.datasets.items()
        }
        self._modules = components.all_modules if self._trains else components.evaluated_modules
        # Built once: they are asked for with every batch.
        self._planned_items: dict[tuple[str, int], Items] = {}
        self._dtype = _PRECISIONS.get(experiment.settings.training.precision)
        # In rounds all ranks run the same modules at once, so collectives of FSDP and SyncBatchNorm meet.
        is_alone = not experiment.runs_in_rounds
        self._guards: dict[str, AbstractContextManager[None]] = {
            name: collectives_refused(f"module_transforms/{name}.py") if is_alone else nullcontext()
            for name in components.datasets
        }
        folder = experiment.folder / "module_transforms"
        self._files = {name: folder / f"{name}.py" for name in components.datasets}
        # By dataset, the registers that its module transform feeds in this split.
        recorded = experiment.settings.registers_of("train" if self._trains else "val")
        self._registers = {
            name: tuple(register for register in recorded if register.name in definition.loss_registers)
            for name, definition in components.module_transforms.items()
        }

    def _counter_of(self, dataset: str) -> Callable[[Batch], object]:
        """Return what counts the items of a collated batch."""
        if not self._experiment.components.module_transforms[dataset].counts_items:
            return count_nothing
        # Looked up for every batch: loaders exist before the module transforms do.
        return partial(_count, self._experiment.module_transforms, dataset)

    @contextmanager
    def average_swapped(self, name: str | None) -> Iterator[None]:
        """Let the average of this name stand in for its source in this block; without a name change nothing."""
        before = self._modules
        components = self._experiment.components
        if name is not None:
            average = components.averages[name]
            self._modules = components.evaluated_modules | {average.source: components.all_modules[name]}
        try:
            yield
        finally:
            self._modules = before

    def points(self, epoch: int) -> Points:
        """Return which points the batches of an epoch hold."""
        if self._endless is not None:
            return self._endless
        seed = self._experiment.settings.training.seed
        return EpochPoints(seed, epoch, self._split, self._indices, is_shuffled=self._trains)

    @property
    def starts_workers(self) -> bool:
        """Return whether loading begins with workers that are not there yet."""
        return any(loader.starts_workers for loader in self._loaders.values())

    @property
    def shows_positions(self) -> bool:
        """Return whether a dataset or a data transform reads the position of its batch."""
        return any(loader.reads_position for loader in self._loaders.values())

    def load(
        self, refs: list[BatchRef], points: Points, positions: Iterable[Position] | None = None
    ) -> Iterator[LoadedBatch]:
        """Return these batches, in order; every dataset has a loader of its own, which may work ahead.

        ``positions`` are needed if datasets read them; without, all batches are run where the runner stands.
        """
        by_dataset: dict[str, list[BatchRef]] = {}
        places: dict[str, list[Position]] = {}
        for ref in refs:
            by_dataset.setdefault(ref.shape.dataset, []).append(ref)
        if self.shows_positions:
            for ref, position in zip(refs, repeat(self.position) if positions is None else positions, strict=False):
                places.setdefault(ref.shape.dataset, []).append(position)
        loading = {
            name: self._loaders[name].load(_Planned(points, chosen, places.get(name, [])))
            for name, chosen in by_dataset.items()
        }
        return (next(loading[ref.shape.dataset]) for ref in refs)

    def close(self) -> None:
        for loader in self._loaders.values():
            loader.close()

    def items(self, loaded: LoadedBatch | None, ref: BatchRef) -> Items:
        """Return how many items of each register a batch has; without the batch, how many if none are counted."""
        dataset = ref.shape.dataset
        registers = self._registers[dataset]
        if loaded is not None and loaded.counts is not None:
            return count_items(loaded.counts, registers, ref.num_items, self._files[dataset])
        # Asked of every batch of all ranks in every step, and the same for all but the last of a pass.
        key = (dataset, ref.num_items)
        if key not in self._planned_items:
            self._planned_items[key] = count_items(None, registers, ref.num_items, self._files[dataset])
        return self._planned_items[key]

    def losses(
        self, loaded: LoadedBatch, ref: BatchRef, items: Items, key: Key, needed: frozenset[str] | None = None
    ) -> dict[str, torch.Tensor]:
        """Run one batch through the modules; everything random in it follows from ``key``.

        Of the optimised registers, those in ``needed`` must be there; None stands for all.
        """
        return self._run(loaded, ref, items, key, needed)[0]

    def evaluate(
        self, loaded: LoadedBatch, ref: BatchRef, items: Items, key: Key
    ) -> tuple[dict[str, torch.Tensor], dict[str, Arguments]]:
        """Run one batch, and return its losses and what it has for metrics."""
        losses, results = self._run(loaded, ref, items, key)
        dataset = ref.shape.dataset
        metrics = self._experiment.components.module_transforms[dataset].metrics
        return losses, check_arguments(results, metrics, self._files[dataset]) if metrics else {}

    def _run(
        self, loaded: LoadedBatch, ref: BatchRef, items: Items, key: Key, needed: frozenset[str] | None = None
    ) -> tuple[dict[str, torch.Tensor], Any]:
        dataset = ref.shape.dataset
        definition = self._experiment.components.module_transforms[dataset]
        if definition.is_whole_step:
            # The batch is a step of its own.
            rows = as_float32(self.embed(loaded, ref, key))
            return self._loss(rows, ref, (*key, "loss"))
        results = self._call("__call__", loaded.batch, ref, key)
        names = (*definition.loss_registers, *definition.metrics)
        if self._shards_modules and self._trains:
            self._refuse_absent(dataset, results)
        losses = check_losses(
            results,
            self._registers[dataset],
            names,
            items,
            loaded.counts,
            self._files[dataset],
            self._processes.device,
            needed,
        )
        return losses, results

    def embed(self, loaded: LoadedBatch, ref: BatchRef, key: Key) -> Rows:
        """Return the rows of a batch whose loss couples all rows of a step."""
        rows = self._call("embed", loaded.batch, ref, key)
        return check_rows(rows, ref.num_items, self._files[ref.shape.dataset], self._processes.device)

    def loss(self, rows: Rows, ref: BatchRef, key: Key) -> dict[str, torch.Tensor]:
        """Return the losses over the rows of all batches of a dataset in a step, of which ``ref`` is one."""
        return self._loss(rows, ref, key)[0]

    def _loss(self, rows: Rows, ref: BatchRef, key: Key) -> tuple[dict[str, torch.Tensor], Any]:
        dataset = ref.shape.dataset
        file = self._files[dataset]
        definition = self._experiment.components.module_transforms[dataset]
        num_rows = len(next(iter(rows.values())))
        modules = self._experiment.components.trained_modules if self._trains else {}
        before = buffer_versions(modules)
        results = self._call("loss", dict(rows), ref, key)
        written = [name for name, version in buffer_versions(modules).items() if before.get(name) != version]
        if written:
            what = f"loss must not write to buffers of modules, but wrote to {written[0]}"
            fix = "run what keeps statistics, such as BatchNorm, in embed"
            raise BrokenContract(Problem(place_of(file, "loss"), what, fix))
        names = (*definition.loss_registers, *definition.metrics)
        if isinstance(results, Mapping):
            check_values({name: results[name] for name in definition.loss_registers if name in results}, num_rows, file)
        items = {register.name: num_rows for register in self._registers[dataset]}
        device = self._processes.device
        return check_losses(results, self._registers[dataset], names, items, None, file, device, method="loss"), results

    def check_kinds(self, rows: Rows, ref: BatchRef, expected: tuple[RowKind, ...]) -> None:
        """Refuse rows of other names, types or shapes than those of the dataset's other batches."""
        found = kinds_of(rows)
        if found != expected:
            what = f"must return the same names, types and shapes for every batch, here {describe_kinds(expected)}"
            fix = "pad what differs from batch to batch in embed"
            raise broken_rows(self._files[ref.shape.dataset], f"{what}, but returned {describe_kinds(found)}", fix)

    def check_rows(self, loaded: LoadedBatch, ref: BatchRef, key: Key) -> int:
        """Return the bytes of a row; refuse rows that are others when a batch is embedded again."""
        embedded = []
        for _ in range(2):
            with torch.no_grad(), preserved_buffers(self._experiment.components.all_modules.values()):
                embedded.append(self.embed(loaded, ref, key))
        first, second = embedded
        self.check_kinds(second, ref, kinds_of(first))
        for name, row in first.items():
            if not torch.allclose(row.double(), second[name].double(), rtol=1e-3, atol=1e-5, equal_nan=True):
                what = f"must return the same rows when it is called again with a batch, but {name!r} differs"
                raise broken_rows(self._files[ref.shape.dataset], what, "do not change the batch in place")
        return row_bytes(kinds_of(as_float32(first)))

    def check_items(self, loaded: LoadedBatch, ref: BatchRef) -> Items:
        """Return the items of a batch; refuse counts that are others when they are asked for again."""
        dataset = ref.shape.dataset
        again = self._counter_of(dataset)(loaded.batch)
        if again != loaded.counts:
            what = f"must return the same for the same batch, but returned {loaded.counts!r} and then {again!r}"
            raise broken_count(self._files[dataset], what)
        return self.items(loaded, ref)

    def check_ignored(
        self, loaded: LoadedBatch, ref: BatchRef, losses: Mapping[str, torch.Tensor], items: Items
    ) -> None:
        """Refuse counted registers in which more values differ from 0 than items were counted; waits for the device."""
        for name in loaded.counts or ():
            num_values = int(losses[name].count_nonzero()) if name in losses else 0
            if num_values > items[name]:
                what = f"must count every value, but counts {items[name]} for {name!r}, while {num_values} are not 0"
                raise broken_count(self._files[ref.shape.dataset], what)

    def _refuse_absent(self, dataset: str, results: object) -> None:
        """Refuse results without an optimised register: other ranks would wait for the gradients of its modules."""
        names = {register.name for register in self._registers[dataset] if register.optimize}
        absent = sorted(names - set(results)) if isinstance(results, Mapping) else []
        if absent:
            where = place_of(self._files[dataset], "__call__")
            what = f"must return {', '.join(absent)} for every batch with parallelism: fsdp, also without any items"
            fix = "return values of 0 for what does not count, as torch's losses do with ignore_index"
            raise BrokenContract(Problem(where, what, fix))

    def predictions(self, batch: Batch, ref: BatchRef, key: Key) -> object:
        """Let the module transform predict for a batch whose losses are known."""
        return self._call("predict", batch, ref, key)

    def run_modules(self, loaded: LoadedBatch, ref: BatchRef, key: Key) -> None:
        """Run the modules on a batch for what that does to their buffers."""
        definition = self._experiment.components.module_transforms[ref.shape.dataset]
        self._call("embed" if definition.is_whole_step else "__call__", loaded.batch, ref, key)

    def bind(self, method: str, loaded: LoadedBatch, ref: BatchRef, key: Key) -> Callable[..., Any]:
        """Return an optional method of a module transform, to be called with what it takes besides a batch."""
        return partial(self._call, method, loaded.batch, ref, key)

    def _call(self, method: str, batch: Batch, ref: BatchRef, key: Key, *more: object) -> Any:
        """Call a method of a module transform with a batch and the modules; what it draws follows from ``key``."""
        transform = self._experiment.module_transforms[ref.shape.dataset]
        show_position(transform, self.position)
        seed_generators(*key)
        call = partial(getattr(transform, method), batch, self._modules, *more)
        with self._guards[ref.shape.dataset]:
            if self._dtype is None:
                return call()
            with torch.autocast(self._processes.device.type, dtype=self._dtype):
                return call()


def _count(transforms: Mapping[str, BaseModuleTransform], dataset: str, batch: Batch) -> object:
    """Let a module transform count the items of a batch."""
    # It may run in a worker, or long before the step: what it would read depends on when the batch is loaded.
    show_position(transforms[dataset], None)
    counts = transforms[dataset].count_items(batch)  # type: ignore[attr-defined]
    return {name: _as_integer(value) for name, value in counts.items()} if isinstance(counts, Mapping) else counts


def _as_integer(value: object) -> object:
    """Return an integer of numpy or torch as Python's; leave anything else as it is."""
    try:
        return value if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return value


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that a device, or this machine, has no memory left."""
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in _OUT_OF_MEMORY)


class out_of_memory_explained:  # noqa: N801 (used like a function)
    """Turn a lack of memory in this block into one sentence that names the batch."""

    def __init__(self, batch: Batch, ref: BatchRef, device: torch.device) -> None:
        self._batch = batch
        self._ref = ref
        self._device = device

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, (RuntimeError, MemoryError)) or isinstance(error, PipelineError):
            return
        if not is_out_of_memory(error):
            return
        dataset = self._ref.shape.dataset
        shapes = ", ".join(islice(_shapes(self._batch), _MAX_SHOWN_TENSORS)) or type(self._batch).__name__
        raise PipelineError(
            f"Out of memory on {self._device} in a batch of dataset {dataset!r} with batch_size "
            f"{self._ref.shape.batch_size}: {shapes}.\n"
            f"  fix: lower batch_size in pymodules/dataloaders/{dataset}.py, which leaves the items of a step as they "
            "are, or set precision to bf16 in settings/training.json; then start again with --reset."
        ) from error


def _shapes(batch: Batch, name: str = "") -> Iterator[str]:
    """Yield name, shape and type of the tensors of a batch."""
    if isinstance(batch, torch.Tensor):
        yield f"{name} {tuple(batch.shape)} {str(batch.dtype).removeprefix('torch.')}".strip()
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _shapes(value, f"{name}.{key}".lstrip("."))
    elif isinstance(batch, (list, tuple)):
        for index, value in enumerate(batch):
            yield from _shapes(value, f"{name}[{index}]")
