"""The history of an experiment, read from its results without touching them and without torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pipeline.errors import UnreadableFile
from pipeline.monitoring.status_file import read_status
from pipeline.paths import LOSS_REG_DATA, LOSS_WEIGHT_DATA, LR_DATA, ExperimentPaths
from pipeline.serialization.npz_files import columns_of
from pipeline.store.generations import HIDDEN, Generations
from pipeline.store.manifest import Manifest
from pipeline.store.store import read_current_manifest
from pipeline.system.files import read_regular

_NUM_TRIES = 5
_STEP_FILE = re.compile(rf"{LOSS_REG_DATA}/train/(?P<register>.+)/step_data_(?P<epoch>\d+)\.npz")
_RATE_FILE = re.compile(rf"{LR_DATA}/(?P<optimizer>.+)/step_data_(?P<epoch>\d+)\.npz")
_WEIGHT_FILE = re.compile(rf"{LOSS_WEIGHT_DATA}/loss_weights_(?P<epoch>\d+)\.json")
Answer = TypeVar("Answer")


@dataclass
class Curve:
    """Values over epochs; a step in the middle of epoch 3 stands at 2.5."""

    epochs: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, epoch: int, values: np.ndarray, num_steps: int, items: np.ndarray | None = None) -> None:
        """Add the steps of one epoch; steps in which a register had no items are left out."""
        has_items = np.ones(len(values), dtype=bool) if items is None else items > 0
        self.epochs += (epoch - 1 + (np.flatnonzero(has_items) + 1) / num_steps).tolist()
        self.values += values[has_items].tolist()


@dataclass
class Steps:
    """What was recorded at every step: losses by register, rates by param group, norms by optimizer."""

    losses: dict[str, Curve] = field(default_factory=dict)
    rates: dict[str, Curve] = field(default_factory=dict)
    grad_norms: dict[str, Curve] = field(default_factory=dict)
    skipped: list[float] = field(default_factory=list)


class History:
    """What an experiment has recorded so far; every question is answered from one commit."""

    def __init__(self, paths: ExperimentPaths) -> None:
        self._paths = paths

    def epochs(self, split: str) -> dict[str, Curve]:
        """Return the means of every register over the finished epochs of ``train`` or ``val``."""
        return self._ask(lambda files, _: _epochs(files, split))

    def steps(self) -> Steps:
        """Return what was recorded at every step, the running epoch included."""
        return self._ask(self._steps)

    def loss_weights(self) -> dict[str, Curve]:
        """Return the weight of every register after each evaluation."""
        return self._ask(lambda files, _: _loss_weights(files))

    def _ask(self, answer: Callable[[dict[str, Path], Manifest | None], Answer]) -> Answer:
        """Answer from the current commit; if a live run drops its files, from the next one."""
        for number in range(_NUM_TRIES):
            manifest = read_current_manifest(self._paths)
            try:
                return answer(_files(self._paths, manifest), manifest)
            except (OSError, UnreadableFile):
                if number == _NUM_TRIES - 1 or read_current_manifest(self._paths) == manifest:
                    raise
        raise AssertionError("the last try returns or raises")

    def _steps(self, files: dict[str, Path], manifest: Manifest | None) -> Steps:
        found = Steps()
        # Epochs in their order, whatever the order of their file names.
        for path in sorted(files, key=lambda path: (_epoch_of(path), path)):
            if match := _STEP_FILE.fullmatch(path):
                _add_losses(found, match["register"], int(match["epoch"]), files[path])
            elif match := _RATE_FILE.fullmatch(path):
                _add_rates(found, match["optimizer"], int(match["epoch"]), files[path])
        if manifest is not None:
            _add_running(found, manifest.progress.epoch, _segments(files), self._num_steps(found))
        return found

    def _num_steps(self, found: Steps) -> int:
        """Return the number of steps of an epoch, the same for all; 0 while it is unknown."""
        counted = [sum(epoch <= 1 for epoch in curve.epochs) for curve in found.rates.values()]
        said = read_status(self._paths.status_file).get("num_steps")
        return max(counted, default=0) or (said if isinstance(said, int) else 0)


def _files(paths: ExperimentPaths, manifest: Manifest | None) -> dict[str, Path]:
    """Return every recorded file by its path below data/, from the commit if there is one."""
    generations = Generations(paths)
    if manifest is not None:
        return {path: generations.stored(entry) for path, entry in generations.all_files(manifest).items()}
    return {path.relative_to(paths.data).as_posix(): path for path in sorted(paths.data.rglob("*")) if path.is_file()}


def _epoch_of(path: str) -> int:
    return int(numbers[-1]) if (numbers := re.findall(r"_(\d+)\.\w+$", path)) else 0


def _epochs(files: dict[str, Path], split: str) -> dict[str, Curve]:
    prefix = f"{LOSS_REG_DATA}/{split}/"
    suffix = "/epoch_data.npz"
    curves = {}
    for path in sorted(path for path in files if path.startswith(prefix) and path.endswith(suffix)):
        with columns_of(files[path]) as found:
            curve = Curve(found["epochs"].tolist(), found["means"].tolist())
        curves[path.removeprefix(prefix).removesuffix(suffix)] = curve
    return curves


def _loss_weights(files: dict[str, Path]) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    for path in sorted(filter(_WEIGHT_FILE.fullmatch, files), key=_epoch_of):
        for register, weight in _weights_in(files[path]).items():
            curve = curves.setdefault(register, Curve())
            curve.epochs.append(_epoch_of(path))
            curve.values.append(weight)
    return curves


def _weights_in(path: Path) -> dict[str, float]:
    try:
        return dict(json.loads(read_regular(path))["loss_weights"])
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise UnreadableFile(f"{path} must hold the loss weights of an epoch, but does not: {error}.") from error


def _add_losses(found: Steps, register: str, epoch: int, path: Path) -> None:
    with columns_of(path) as columns:
        num_steps = len(columns["steps"])
        if not found.losses.get(register):
            found.losses[register] = Curve()
        if register == next(iter(found.losses)):
            found.skipped += (epoch - 1 + columns["steps"][columns["skipped"]] / num_steps).tolist()
        found.losses[register].add(epoch, columns["means"], num_steps, columns["items"])


def _add_rates(found: Steps, optimizer: str, epoch: int, path: Path) -> None:
    with columns_of(path) as columns:
        num_steps = len(columns["steps"])
        found.grad_norms.setdefault(optimizer, Curve()).add(epoch, columns["grad_norms"], num_steps)
        for name in columns:
            if name.startswith("lr_"):
                group = f"{optimizer}/{name.removeprefix('lr_')}"
                found.rates.setdefault(group, Curve()).add(epoch, columns[name], num_steps)


def _segments(files: dict[str, Path]) -> list[dict[str, Any]]:
    """Return the columns of the running epoch's steps, piece by piece."""
    pieces = []
    for path in sorted(path for path in files if path.startswith(HIDDEN)):
        with columns_of(files[path]) as columns:
            pieces.append(dict(columns))
    return pieces


def _add_running(found: Steps, epoch: int, pieces: list[dict[str, Any]], num_steps: int) -> None:
    if not pieces:
        return
    columns = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    num_steps = max(num_steps, len(columns["skipped"]))
    found.skipped += (epoch - 1 + (np.flatnonzero(columns["skipped"]) + 1) / num_steps).tolist()
    kinds = {"means": found.losses, "lr": found.rates, "grad_norm": found.grad_norms}
    for name, values in columns.items():
        kind, _, rest = name.partition("/")
        if kind in kinds:
            items = columns[f"items/{rest}"] if kind == "means" else None
            kinds[kind].setdefault(rest, Curve()).add(epoch, values, num_steps, items)
