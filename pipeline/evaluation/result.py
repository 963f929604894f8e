"""The outcome of an evaluation as a file: values and predictions, or a shard that can be merged exactly."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np
import torch

from pipeline.checkpoint.records import npz_writer
from pipeline.components.losses import mean
from pipeline.errors import UnreadableFile, UsageError
from pipeline.experiment.dataset_fingerprints import Fingerprints
from pipeline.serialization.npz_files import columns_of
from pipeline.system.disk import Writer, bytes_writer
from pipeline.system.formatting import as_json
from pipeline.training.engines.reduction import Branch
from pipeline.training.losses import total_losses
from pipeline.training.metrics import State, Values, join_rows
from pipeline.training.predictions import INDEX, POSITION, Columns, join_predictions
from pipeline.training.step_plan import share_of

SUFFIXES = (".json", ".npz", ".pt")
SHARD_SUFFIXES = (".npz",)
_MAX_SHOWN = 10
_SHOWN_FACTS = ("experiment", "split", "pool", "epoch", "steps", "commit")
_PREDICTIONS = "predictions"
_METRICS = "metrics"
# Entries of the state of a metric: rows that follow each other, or one value.
_ROWS = "rows"
_VALUES = "values"
# Shards have neighbouring batches.
BLOCKS = "blocks"


class _Layout(TypedDict, total=False):
    # Which batches a shard has; the files of earlier versions do not say it.
    layout: str
    # The average that stood in for its source by request.
    average: str


class Facts(_Layout):
    """What was evaluated; the shards of one evaluation have the same facts."""

    experiment: str
    split: str
    pool: str
    # The last epoch that the weights have seen whole, and the steps they have taken after it.
    epoch: int | None
    steps: int
    commit: int
    # Fingerprints of the weights, of the frozen copy and of the datasets.
    weights: str
    code: str
    datasets: Fingerprints
    # Of the whole split: its batches, the items of each register if none were counted or absent, and the items of each
    # dataset with predictions.
    batches: int
    items: dict[str, int]
    predicted: dict[str, int]


@dataclass(frozen=True)
class Outcome:
    """The outcome of an evaluation, or of one shard of it.

    ``sums`` and ``items`` have a row per batch, of the whole split or of the shard, and a column per register. Of a
    shard, ``states`` are those of its metrics; ``metrics`` are their values once all batches are known.
    """

    facts: Facts
    shard: tuple[int, int]
    world_size: int
    sums: np.ndarray
    items: np.ndarray
    metrics: Values = field(default_factory=dict)
    states: dict[str, list[Branch[State]]] = field(default_factory=dict)
    predictions: dict[str, Columns] = field(default_factory=dict)

    def summary(self) -> dict[str, object]:
        """Return everything but predictions."""
        facts: Mapping[str, object] = self.facts
        shown = {name: facts[name] for name in _SHOWN_FACTS}
        return {**shown, "world_size": self.world_size, "values": self.values()}

    def values(self) -> dict[str, dict[str, float | int]]:
        """Return mean, total and number of items of every register."""
        totals = total_losses(self.sums[None])[0].tolist()
        columns = zip(self.facts["items"], totals, self.items.sum(axis=0).tolist(), strict=True)
        return {
            **{name: {"mean": mean(total, items), "total": total, "items": items} for name, total, items in columns},
            # A metric has one value for the whole split.
            **{name: {"mean": value, "total": value, "items": 1} for name, value in self.metrics.items()},
        }

    def writer(self, suffix: str) -> Writer:
        """Return a writer of the whole outcome in the format that a suffix stands for."""
        summary = self.summary()
        # Without the position of each item, which is its place in the arrays.
        predictions = {
            dataset: {name: column for name, column in columns.items() if name != POSITION}
            for dataset, columns in self.predictions.items()
        }
        if suffix == ".json":
            lists = {
                dataset: {name: column.tolist() for name, column in columns.items()}
                for dataset, columns in predictions.items()
            }
            content = as_json({**summary, _PREDICTIONS: lists})
            # One line per entry: predictions are long, and the rest should still be easy to read.
            lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in content.items()]
            return bytes_writer("{{\n{}\n}}\n".format(",\n".join(lines)).encode())
        if suffix == ".npz":
            values = {
                f"values/{register}/{name}": np.asarray(value)
                for register, entry in self.values().items()
                for name, value in entry.items()
            }
            return npz_writer({"about": _encode(as_json(summary)), **values, **_flatten(predictions)})
        tensors = {
            dataset: {name: torch.from_numpy(column) for name, column in columns.items()}
            for dataset, columns in predictions.items()
        }
        return partial(torch.save, {**summary, _PREDICTIONS: tensors})

    def shard_writer(self) -> Writer:
        """Return a writer of all that a merge needs."""
        held = {name: [[branch.start, branch.size] for branch in branches] for name, branches in self.states.items()}
        about = {"facts": self.facts, "shard": self.shard, "world_size": self.world_size, "metrics": held}
        arrays = {"sums": self.sums, "items": self.items, **_flatten_states(self.states)}
        return npz_writer({"shard": _encode(about), **arrays, **_flatten(self.predictions)})


def read_shard(path: Path) -> Outcome:
    """Read what ``shard_writer`` wrote; refuse any other file."""
    # Every TypeError, ValueError and KeyError in here is reported as damage of the file.
    with columns_of(path) as columns:
        if "shard" not in columns:
            raise UsageError(f"{path} must be a shard of an evaluation, written with --shard, but is not.")
        try:
            about = json.loads(columns["shard"].tobytes())
        except RecursionError as error:
            raise ValueError("what it says of itself makes no sense") from error
        index, count = map(int, about["shard"])
        written: dict[str, Any] = dict(about["facts"])
        for name in ("items", "predicted"):
            # A merge computes with these, so they must be numbers.
            written[name] = {key: int(number) for key, number in dict(written[name]).items()}
        facts = cast(Facts, written)
        sums = columns["sums"]
        if not 0 <= index < count:
            raise ValueError("its place among the shards makes no sense")
        batches = _batches_of(facts, (index, count))
        items = columns["items"] if "items" in columns else _planned_items(facts, sums.shape, index)
        shape = (len(batches), len(facts["items"]))
        is_shard = sums.dtype == np.float64 and items.dtype == np.int64
        if not is_shard or sums.shape != shape or items.shape != shape:
            raise ValueError("the sums of its batches do not fit")
        shard = Outcome(
            facts,
            (index, count),
            int(about["world_size"]),
            sums,
            items,
            states=_read_states(dict(about.get("metrics", {})), columns, batches),
            predictions=_group_predictions(columns),
        )
        # Tried once, so that facts which are missing are reported with the name of this file.
        shard.summary()
        return shard


def _batches_of(facts: Facts, shard: tuple[int, int]) -> range:
    """Return which batches of a split a shard has: neighbours, but of an earlier version every n-th."""
    index, count = shard
    num_batches = int(facts["batches"])
    return share_of(num_batches, index, count) if facts.get("layout") == BLOCKS else range(num_batches)[index::count]


def _flatten_states(states: Mapping[str, list[Branch[State]]]) -> Columns:
    """Return the states of metrics as arrays; the rows that a metric keeps are joined."""
    arrays: Columns = {}
    for name, branches in states.items():
        for number, branch in enumerate(branches):
            for entry, value in (branch.value or {}).items():
                kind = _ROWS if isinstance(value, list) else _VALUES
                tensor = join_rows(value)
                # numpy has no bfloat16, whose numbers are float32's as well.
                plain = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
                arrays[f"{_METRICS}/{name}/{number}/{kind}/{entry}"] = plain.numpy()
    return arrays


def _read_states(held: Mapping[str, Any], arrays: Columns, batches: range) -> dict[str, list[Branch[State]]]:
    """Return what ``_flatten_states`` made arrays of, or raise ValueError if it is not the states of these batches."""
    states: dict[str, list[Branch[State]]] = {
        name: [Branch(int(start), int(size), None) for start, size in places] for name, places in held.items()
    }
    for branches in states.values():
        following = batches.start
        for branch in branches:
            if branch.start != following or branch.size < 1:
                raise ValueError("the batches of its metrics make no sense")
            following += branch.size
        if following != batches.stop:
            raise ValueError("the batches of its metrics are not all of the shard's")
    for path, array in arrays.items():
        if path.startswith(f"{_METRICS}/"):
            _, name, number, kind, entry = path.split("/", 4)
            if not 0 <= int(number) < len(states[name]):
                raise ValueError("the states of its metrics do not fit")
            branch = states[name][int(number)]
            tensor = torch.from_numpy(array)
            state = {**(branch.value or {}), entry: [tensor] if kind == _ROWS else tensor}
            states[name][int(number)] = Branch(branch.start, branch.size, state)
    return states


def _planned_items(facts: Facts, shape: tuple[int, ...], index: int) -> np.ndarray:
    """Return items of a shard of an earlier version, which did not say in which batches they are: all in the first."""
    items = np.zeros(shape, dtype=np.int64)
    planned = list(facts["items"].values())
    if any(number >= 1 << 63 for number in planned):
        raise ValueError("it has more items than can be")
    if index == 0 and len(items):
        items[0] = planned
    return items


def _group_predictions(arrays: Columns) -> dict[str, Columns]:
    """Return the predictions of a file by dataset, or raise ValueError if columns of one have different lengths."""
    grouped: dict[str, Columns] = {}
    for path, column in arrays.items():
        if path.startswith(f"{_PREDICTIONS}/"):
            _, dataset, name = path.split("/")
            grouped.setdefault(dataset, {})[name] = column
    for dataset, columns in grouped.items():
        shapes = {columns[name].shape for name in (INDEX, POSITION)}
        if len(shapes) > 1 or {column.shape[:1] for column in columns.values()} != shapes:
            raise ValueError(f"the predictions of {dataset} do not fit together")
    return grouped


def merge(shards: list[Outcome]) -> Outcome:
    """Put all shards of one evaluation together, or refuse missing, doubled and foreign ones."""
    _refuse_other_shards(shards)
    first = shards[0]
    # The table of the whole split, as if one evaluation had filled it: sums are then added in the planned order.
    sums = np.zeros((first.facts["batches"], len(first.facts["items"])))
    items = np.zeros(sums.shape, dtype=np.int64)
    states: dict[str, list[Branch[State]]] = {}
    for shard in shards:
        rows = _batches_of(first.facts, shard.shard)
        sums[rows] = shard.sums
        items[rows] = shard.items
        for name, branches in shard.states.items():
            states.setdefault(name, []).extend(branches)
    predictions = join_predictions(part for shard in shards for part in shard.predictions.items())
    for dataset, num_items in first.facts["predicted"].items():
        positions = predictions.get(dataset, {}).get(POSITION, np.zeros(0))
        if len(positions) != num_items or not np.array_equal(positions, np.arange(len(positions))):
            raise UnreadableFile(f"The shards must hold a prediction for each of {num_items} items of {dataset}, once.")
    world_size = sum(shard.world_size for shard in shards)
    return replace(
        first, shard=(0, 1), world_size=world_size, sums=sums, items=items, states=states, predictions=predictions
    )


def _refuse_other_shards(shards: list[Outcome]) -> None:
    """Refuse shards of another evaluation, shards that are given twice, and missing ones."""
    count = shards[0].shard[1]
    expected: dict[str, object] = {**shards[0].facts, "number of shards": count}
    for shard in shards:
        facts: dict[str, object] = {**shard.facts, "number of shards": shard.shard[1]}
        for name in sorted({*facts, *expected}):
            if facts.get(name) != expected.get(name):
                raise UsageError(
                    f"All shards must be of one evaluation, but {name} is {expected.get(name)!r} in the first file "
                    f"and {facts.get(name)!r} in that of shard {shard.shard[0]}/{shard.shard[1]}."
                )
    indices = [shard.shard[0] for shard in shards]
    doubled = sorted({f"{index}/{count}" for index in indices if indices.count(index) > 1})
    if doubled:
        raise UsageError(f"Each shard must be given once, but there are several of {', '.join(doubled)}.")
    # Limited, because the number of shards comes from a file and may be anything.
    candidates = islice(range(count), len(indices) + _MAX_SHOWN)
    missing = [f"{index}/{count}" for index in candidates if index not in indices]
    if missing:
        raise UsageError(f"All {count} shards must be given, but these are missing: {', '.join(missing[:_MAX_SHOWN])}.")


def _flatten(predictions: dict[str, Columns]) -> Columns:
    return {
        f"{_PREDICTIONS}/{dataset}/{name}": column
        for dataset, columns in predictions.items()
        for name, column in columns.items()
    }


def _encode(value: dict[str, object]) -> np.ndarray:
    """Return JSON as an array of bytes, because a file of arrays holds nothing but numbers."""
    return np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)


def lines(outcome: Outcome) -> Iterator[str]:
    """Yield what a person reads on the terminal, one line per register."""
    facts = outcome.facts
    more = f" and {facts['steps']} steps" if facts["steps"] else ""
    epoch = f"epoch {facts['epoch']}{more}, " if facts["epoch"] is not None else ""
    yield f"{facts['experiment']}, {facts['split']} split, pool {facts['pool']} ({epoch}commit {facts['commit']})"
    width = max(map(len, facts["items"]))
    for register, value in outcome.values().items():
        yield f"  {register:{width}}  {value['mean']:>12.6g}  over {value['items']} items"
