"""The outcome of an evaluation as a file: values and predictions, or a shard that can be merged exactly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from pipeline.checkpoint.records import npz_writer
from pipeline.components.losses import mean
from pipeline.errors import UnreadableFile, UsageError
from pipeline.serialization.npz_files import columns_of
from pipeline.system.disk import Writer, bytes_writer
from pipeline.system.formatting import as_json
from pipeline.training.losses import total_losses
from pipeline.training.predictions import INDEX, POSITION, Columns, join_predictions

SUFFIXES = (".json", ".npz", ".pt")
SHARD_SUFFIXES = (".npz",)
_SHOWN = 10
_SHOWN_FACTS = ("experiment", "split", "pool", "epoch", "steps", "commit")


@dataclass(frozen=True)
class Outcome:
    """What an evaluation, or one shard of it, has found.

    ``facts`` say what was evaluated: shards belong together if theirs are the same. ``sums`` has a row per batch,
    of the whole split or of the shard, and a column per register.
    """

    facts: dict[str, Any]
    shard: tuple[int, int]
    world_size: int
    sums: np.ndarray
    predictions: dict[str, Columns] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """Return everything but predictions."""
        facts = {name: self.facts[name] for name in _SHOWN_FACTS}
        return {**facts, "world_size": self.world_size, "values": self.values()}

    def values(self) -> dict[str, dict[str, float | int]]:
        """Return mean, total and number of items of every register."""
        totals = total_losses(self.sums[None])[0].tolist()
        return {
            register: {"mean": mean(total, items), "total": total, "items": items}
            for (register, items), total in zip(self.facts["items"].items(), totals, strict=True)
        }

    def public_predictions(self) -> dict[str, Columns]:
        """Return the predictions without our own place of each item, which is its place in the arrays."""
        return {
            dataset: {name: column for name, column in columns.items() if name != POSITION}
            for dataset, columns in self.predictions.items()
        }

    def writer(self, suffix: str) -> Writer:
        """Return a writer of the whole outcome in the format that a suffix stands for."""
        return {".json": self._json_writer, ".npz": self._npz_writer, ".pt": self._pt_writer}[suffix]()

    def _json_writer(self) -> Writer:
        predictions = {
            dataset: {name: column.tolist() for name, column in columns.items()}
            for dataset, columns in self.public_predictions().items()
        }
        content = as_json({**self.summary(), "predictions": predictions})
        # One line per entry: predictions are long, and the rest should still be read with ease.
        lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in content.items()]
        return bytes_writer("{{\n{}\n}}\n".format(",\n".join(lines)).encode())

    def _npz_writer(self) -> Writer:
        values = {
            f"values/{register}/{name}": np.asarray(value)
            for register, entry in self.values().items()
            for name, value in entry.items()
        }
        return npz_writer({"about": _encoded(as_json(self.summary())), **values, **_flat(self.public_predictions())})

    def _pt_writer(self) -> Writer:
        predictions = {
            dataset: {name: torch.from_numpy(column) for name, column in columns.items()}
            for dataset, columns in self.public_predictions().items()
        }

        def write(file: BinaryIO) -> None:
            torch.save({**self.summary(), "predictions": predictions}, file)

        return write

    def shard_writer(self) -> Writer:
        """Return a writer of all that a merge needs."""
        about = {"facts": self.facts, "shard": self.shard, "world_size": self.world_size}
        return npz_writer({"shard": _encoded(about), "sums": self.sums, **_flat(self.predictions)})


def read_shard(path: Path) -> Outcome:
    """Read what ``shard_writer`` wrote; refuse any other file."""
    with columns_of(path) as found:
        if "shard" not in found:
            raise UsageError(f"{path} must be a shard of an evaluation, written with --shard, but is not.")
        about = _decoded(found["shard"])
        (index, count) = map(int, about["shard"])
        facts = dict(about["facts"])
        sums = found["sums"]
        facts |= {name: {key: int(one) for key, one in dict(facts[name]).items()} for name in ("items", "predicted")}
        rows = len(range(int(facts["batches"]))[index::count])
        if not 0 <= index < count or sums.dtype != np.float64 or sums.shape != (rows, len(facts["items"])):
            raise ValueError("the sums of its batches do not fit")
        shard = Outcome(facts, (index, count), int(about["world_size"]), sums, _nested(found))
        shard.summary()
        return shard


def merge(shards: list[Outcome]) -> Outcome:
    """Put all shards of one evaluation together, or refuse missing, doubled and foreign ones."""
    first = shards[0]
    count = shards[0].shard[1]
    for shard in shards:
        _refuse_foreign(shard, first)
    _refuse_incomplete([shard.shard[0] for shard in shards], count)
    sums = np.zeros((first.facts["batches"], len(first.facts["items"])))
    for shard in shards:
        sums[shard.shard[0] :: count] = shard.sums
    predictions = join_predictions(part for shard in shards for part in shard.predictions.items())
    world_size = sum(shard.world_size for shard in shards)
    merged = replace(first, shard=(0, 1), world_size=world_size, sums=sums, predictions=predictions)
    _refuse_gaps(merged)
    return merged


def _refuse_foreign(shard: Outcome, first: Outcome) -> None:
    mine, theirs = ({**one.facts, "number of shards": one.shard[1]} for one in (shard, first))
    differing = [name for name in sorted({*mine, *theirs}) if mine.get(name) != theirs.get(name)]
    if differing:
        name = differing[0]
        raise UsageError(
            f"All shards must be of one evaluation, but {name} is {theirs.get(name)!r} in the first file and "
            f"{mine.get(name)!r} in that of shard {shard.shard[0]}/{shard.shard[1]}."
        )


def _refuse_incomplete(places: list[int], count: int) -> None:
    doubled = sorted({f"{place}/{count}" for place in places if places.count(place) > 1})
    if doubled:
        raise UsageError(f"Each shard must be given once, but there are several of {', '.join(doubled)}.")
    missing = [f"{one}/{count}" for one in islice(range(count), len(places) + _SHOWN) if one not in places]
    if missing:
        raise UsageError(f"All {count} shards must be given, but there is no {', '.join(missing[:_SHOWN])}.")


def _refuse_gaps(merged: Outcome) -> None:
    for dataset, num_items in merged.facts["predicted"].items():
        positions = merged.predictions.get(dataset, {}).get(POSITION, np.zeros(0))
        if len(positions) != num_items or not np.array_equal(positions, np.arange(len(positions))):
            raise UnreadableFile(f"The shards must hold a prediction for each of {num_items} items of {dataset}, once.")


def _flat(predictions: dict[str, Columns]) -> Columns:
    return {
        f"predictions/{dataset}/{name}": column
        for dataset, columns in predictions.items()
        for name, column in columns.items()
    }


def _nested(arrays: Columns) -> dict[str, Columns]:
    found: dict[str, Columns] = {}
    for name, column in arrays.items():
        if name.startswith("predictions/"):
            _, dataset, inner = name.split("/")
            found.setdefault(dataset, {})[inner] = column
    for dataset, columns in found.items():
        shapes = {columns[name].shape for name in (INDEX, POSITION)}
        if len(shapes) > 1 or {column.shape[:1] for column in columns.values()} != shapes:
            raise ValueError(f"the predictions of {dataset} do not fit together")
    return found


def _encoded(value: dict[str, Any]) -> np.ndarray:
    """Return JSON as an array of bytes, because a file of arrays holds nothing but numbers."""
    return np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)


def _decoded(content: np.ndarray) -> Any:
    try:
        return json.loads(content.tobytes())
    except RecursionError as error:
        raise ValueError("what it says of itself makes no sense") from error


def lines(outcome: Outcome) -> Iterator[str]:
    """Yield what a person reads on the terminal, one line per register."""
    facts = outcome.facts
    more = f" and {facts['steps']} steps" if facts["steps"] else ""
    epoch = f"epoch {facts['epoch']}{more}, " if facts["epoch"] is not None else ""
    yield f"{facts['experiment']}, {facts['split']} split, pool {facts['pool']} ({epoch}commit {facts['commit']})"
    width = max(map(len, facts["items"]))
    for register, value in outcome.values().items():
        yield f"  {register:{width}}  {value['mean']:>12.6g}  over {value['items']} items"
