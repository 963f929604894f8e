"""The recorded curves of an experiment, read from its results without changing them and without torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from pipeline.errors import UnreadableFile
from pipeline.paths import LOSS_REG_DATA, LOSS_WEIGHT_DATA, LR_DATA, ExperimentPaths
from pipeline.serialization.npz_files import columns_of
from pipeline.store.generations import HIDDEN, Generations
from pipeline.store.manifest import Manifest
from pipeline.store.store import read_current_manifest
from pipeline.system.files import read_regular

_MAX_TRIES = 5
_STEP_FILE = re.compile(rf"{LOSS_REG_DATA}/train/(?P<register>.+)/step_data_(?P<epoch>\d+)\.npz")
_RATE_FILE = re.compile(rf"{LR_DATA}/(?P<optimizer>.+)/step_data_(?P<epoch>\d+)\.npz")
_WEIGHT_FILE = re.compile(rf"{LOSS_WEIGHT_DATA}/loss_weights_(?P<epoch>\d+)\.json")
Files = dict[str, Path]
Answer = TypeVar("Answer")


@dataclass
class Curve:
    """Values over epochs; a step in the middle of epoch 3 is at 2.5."""

    epochs: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, epoch: int, values: np.ndarray, num_steps: int, items: np.ndarray | None = None) -> None:
        """Add the steps of one epoch; steps in which a register had no items are left out."""
        # A step without items has no mean. A skipped step had items, and its NaN stays as a gap.
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

    def add_losses(self, register: str, epoch: int, path: Path) -> None:
        with columns_of(path) as columns:
            num_steps = len(columns["steps"])
            curve = self.losses.setdefault(register, Curve())
            # Every register records the same skipped steps; they are counted with the first.
            if register == next(iter(self.losses)):
                self.skipped += (epoch - 1 + columns["steps"][columns["skipped"]] / num_steps).tolist()
            curve.add(epoch, columns["means"], num_steps, columns["items"])

    def add_rates(self, optimizer: str, epoch: int, path: Path) -> None:
        with columns_of(path) as columns:
            num_steps = len(columns["steps"])
            self.grad_norms.setdefault(optimizer, Curve()).add(epoch, columns["grad_norms"], num_steps)
            for name in columns:
                if name.startswith("lr_"):
                    group = f"{optimizer}/{name.removeprefix('lr_')}"
                    self.rates.setdefault(group, Curve()).add(epoch, columns[name], num_steps)

    def add_running(self, epoch: int, segments: list[dict[str, np.ndarray]], num_steps: int) -> None:
        """Add the epoch that is being trained: each commit inside it has added a segment of steps."""
        # A group that was added within the epoch has no column in the segments before.
        gaps = [np.full(len(segment["skipped"]), np.nan) for segment in segments]
        columns = {
            name: np.concatenate([segment.get(name, gap) for segment, gap in zip(segments, gaps, strict=True)])
            for name in dict.fromkeys(name for segment in segments for name in segment)
        }
        # In the first epoch the number of steps may be unknown; then the segments fill it.
        num_steps = max(num_steps, len(columns["skipped"]))
        self.skipped += (epoch - 1 + (np.flatnonzero(columns["skipped"]) + 1) / num_steps).tolist()
        kinds = {"means": self.losses, "lr": self.rates, "grad_norm": self.grad_norms}
        for name, values in columns.items():
            kind, _, rest = name.partition("/")
            if kind in kinds:
                items = columns[f"items/{rest}"] if kind == "means" else None
                kinds[kind].setdefault(rest, Curve()).add(epoch, values, num_steps, items)


class History:
    """What an experiment has recorded up to a commit; a damaged file raises UnreadableFile.

    ``num_steps`` is the length of an epoch if it is known, and is only used before the first epoch is complete.
    """

    def __init__(self, paths: ExperimentPaths, manifest: Manifest | None, *, num_steps: int = 0) -> None:
        self._paths = paths
        self._manifest = manifest
        self._num_steps = num_steps
        self._files: Files | None = None

    def epochs(self, split: str) -> dict[str, Curve]:
        """Return the means of every register over the finished epochs of ``train`` or ``val``."""
        return self._answer(partial(_read_epochs, split=split))

    def steps(self) -> Steps:
        """Return what was recorded at every step, the running epoch included."""
        return self._answer(self._read_steps)

    def loss_weights(self) -> dict[str, Curve]:
        """Return the weight of every register after each evaluation."""
        return self._answer(_read_loss_weights)

    def _answer(self, read: Callable[[Files], Answer]) -> Answer:
        """Read the files of the commit; if a live run has dropped one of them, those of the current commit."""
        for _ in range(_MAX_TRIES - 1):
            try:
                return read(self._list_files())
            except (OSError, UnreadableFile):
                current = read_current_manifest(self._paths)
                # No newer commit: the file is damaged and not dropped.
                if current == self._manifest:
                    raise
                self._manifest = current
                self._files = None
        return read(self._list_files())

    def _list_files(self) -> Files:
        """Return every recorded file by its path below data/, from the commit if there is one."""
        # Kept between questions: the list of sealed files is a chain of one file per stage.
        if self._files is None and self._manifest is not None:
            generations = Generations(self._paths)
            entries = generations.all_files(self._manifest)
            self._files = {path: generations.stored(entry) for path, entry in entries.items()}
        elif self._files is None:
            # Where the generations were deleted or damaged, data/ still shows the last commit.
            data = self._paths.data
            shown = [path for path in sorted(data.rglob("*")) if path.is_file()]
            self._files = {path.relative_to(data).as_posix(): path for path in shown}
        return self._files

    def _read_steps(self, files: Files) -> Steps:
        steps = Steps()
        # Epochs in their order: by name, epoch 10 would come before epoch 9.
        for _, path in sorted((_epoch_of(path), path) for path in files):
            if match := _STEP_FILE.fullmatch(path):
                steps.add_losses(match["register"], int(match["epoch"]), files[path])
            elif match := _RATE_FILE.fullmatch(path):
                steps.add_rates(match["optimizer"], int(match["epoch"]), files[path])
        segments = []
        for path in sorted(path for path in files if path.startswith(HIDDEN)):
            with columns_of(files[path]) as columns:
                segments.append(dict(columns))
        if self._manifest is not None and segments:
            # All epochs have the same number of steps.
            counts = [sum(epoch <= 1 for epoch in curve.epochs) for curve in steps.rates.values()]
            num_steps = max(counts, default=0) or self._num_steps
            steps.add_running(self._manifest.progress.epoch, segments, num_steps)
        return steps


def _epoch_of(path: str) -> int:
    return int(numbers[-1]) if (numbers := re.findall(r"_(\d+)\.\w+$", path)) else 0


def _read_epochs(files: Files, split: str) -> dict[str, Curve]:
    prefix = f"{LOSS_REG_DATA}/{split}/"
    suffix = "/epoch_data.npz"
    curves = {}
    for path in sorted(path for path in files if path.startswith(prefix) and path.endswith(suffix)):
        with columns_of(files[path]) as columns:
            curve = Curve(columns["epochs"].tolist(), columns["means"].tolist())
        curves[path.removeprefix(prefix).removesuffix(suffix)] = curve
    return curves


def _read_loss_weights(files: Files) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    for path in sorted(filter(_WEIGHT_FILE.fullmatch, files), key=_epoch_of):
        try:
            weights = dict(json.loads(read_regular(files[path]))["loss_weights"])
        except (KeyError, RecursionError, TypeError, ValueError) as error:
            reason = f"{files[path]} must hold the loss weights of an epoch, but does not: {error}."
            raise UnreadableFile(reason) from error
        for register, weight in weights.items():
            curve = curves.setdefault(register, Curve())
            curve.epochs.append(_epoch_of(path))
            curve.values.append(weight)
    return curves
