"""The records of an experiment: losses, learning rates and loss weights, in memory and as files."""

from __future__ import annotations

import copy
import io
import math
from array import array
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np

from pipeline.components import Losses, LossRecord
from pipeline.experiment.settings.settings import LossRegister
from pipeline.paths import LOSS_REG_DATA, LR_DATA
from pipeline.serialization.npz_files import columns_of
from pipeline.system.disk import Writer

SPLITS = ("train", "val")
# Columns of steps are arrays of machine numbers: an epoch may have millions of steps.
_Column: TypeAlias = "array[float] | array[int]"
_EPOCH_FIELDS = ("epochs", "epoch_means", "epoch_totals", "epoch_items")


class Records:
    """All that was recorded: whole epochs, and the steps of the running one."""

    def __init__(self, registers: Iterable[LossRegister], rates: Mapping[str, Mapping[str, float]]) -> None:
        registers = tuple(registers)
        self.losses: Losses = {
            split: {
                register.name: LossRecord(register.optimize, register.direction)
                for register in registers
                if split in register.splits
            }
            for split in SPLITS
        }
        self.skipped = array("b")
        self.rates: dict[str, dict[str, array[float]]] = {
            optimizer: {group: array("d") for group in groups} for optimizer, groups in rates.items()
        }
        self.grad_norms: dict[str, array[float]] = {optimizer: array("d") for optimizer in rates}

    @classmethod
    def of_results(cls, registers: Iterable[LossRegister], data: Path, epoch: int) -> Records:
        """Return the records of finished epochs and the steps of ``epoch`` from the results alone."""
        rates: dict[str, dict[str, float]] = {}
        for path in sorted(data.glob(f"{LR_DATA}/*/step_data_{epoch}.npz")):
            with columns_of(path) as columns:
                groups = [name.removeprefix("lr_") for name in columns if name.startswith("lr_")]
            rates[path.parent.name] = dict.fromkeys(groups, 0.0)
        records = cls(registers, rates)
        records.load_epochs(data)
        return records.of_epoch(data, epoch) if epoch else records

    def of_epoch(self, data: Path, epoch: int) -> Records:
        """Return these records with the steps of another epoch, which is finished."""
        other = copy.deepcopy(self)
        other.forget_steps()
        other.load_step_files(data, epoch)
        return other

    @property
    def num_steps(self) -> int:
        """The number of steps of the running epoch whose losses are recorded."""
        return len(next(iter(self.losses["train"].values())).step_means)

    def is_evaluated(self, epoch: int) -> bool:
        """Return whether the latest evaluation is that of an epoch."""
        return any(record.epochs[-1:] == [epoch] for record in self.losses["val"].values())

    def add_step_losses(self, totals: np.ndarray, items: Iterable[int]) -> None:
        """Record one step: a total and a number of items per register, in the settings' order."""
        # Rates and skips of a step are recorded at once, its losses when they have come from the device.
        is_skipped = bool(self.skipped[self.num_steps])
        for record, total, count in zip(self.losses["train"].values(), totals.tolist(), items, strict=True):
            record.add_step(math.nan if is_skipped else total, count)

    def add_step_rates(
        self, rates: Mapping[str, Mapping[str, float]], norms: Mapping[str, float], skipped: bool
    ) -> None:
        self.skipped.append(skipped)
        for optimizer, groups in rates.items():
            self.grad_norms[optimizer].append(norms[optimizer])
            for group, rate in groups.items():
                self._rates_of(optimizer, group, len(self.skipped) - 1).append(rate)

    def _rates_of(self, optimizer: str, group: str, num_steps: int) -> array[float]:
        """Return the rates of a group over so many steps; one that hooks have added since has NaN before."""
        rates = self.rates[optimizer].setdefault(group, array("d"))
        rates.extend([math.nan] * (num_steps - len(rates)))
        return rates

    def finish_train_epoch(self, epoch: int) -> None:
        """Add the epoch's values; steps that were skipped do not count."""
        taken = ~np.asarray(self.skipped, dtype=bool)
        for record in self.losses["train"].values():
            totals = np.asarray(record.step_totals)[taken]
            items = np.asarray(record.step_items)[taken]
            record.add_epoch(epoch, float(totals.sum()), int(items.sum()))

    def forget_steps(self) -> None:
        """Make room for the next epoch."""
        for record in self.losses["train"].values():
            record.forget_steps()
        for column in self._columns().values():
            del column[:]

    def _columns(self) -> dict[str, _Column]:
        """Every per-step column but the losses, by the name it has in a segment file."""
        columns: dict[str, _Column] = {"skipped": self.skipped}
        for optimizer, groups in self.rates.items():
            columns[f"grad_norm/{optimizer}"] = self.grad_norms[optimizer]
            columns |= {f"lr/{optimizer}/{group}": values for group, values in groups.items()}
        return columns

    def _loss_columns(self) -> dict[str, _Column]:
        """The per-step columns of the losses; a skipped step has NaN, and its items."""
        return {
            f"{field}/{register}": getattr(record, f"step_{field}")
            for register, record in self.losses["train"].items()
            for field in ("means", "totals", "items")
        }

    def segment(self, first: int) -> Writer:
        """Return a writer of the running epoch's steps from ``first`` on."""
        columns = {**self._columns(), **self._loss_columns()}
        return npz_writer({name: np.asarray(values)[first:] for name, values in columns.items()})

    def load_segment(self, path: Path) -> None:
        """Append what ``segment`` wrote."""
        with columns_of(path) as stored:
            for name in stored:
                kind, _, rest = name.partition("/")
                if kind == "lr":
                    # A column that hooks have added since an earlier segment.
                    optimizer, _, group = rest.partition("/")
                    self._rates_of(optimizer, group, len(self.skipped))
            columns = {**self._columns(), **self._loss_columns()}
            for name, values in columns.items():
                values.extend(stored[name].tolist())

    def step_files(self, epoch: int) -> dict[str, Writer]:
        """Return the files that hold the finished epoch's steps, by path below data/."""
        steps = np.arange(1, self.num_steps + 1)
        skipped = np.asarray(self.skipped, dtype=bool)
        files = {
            f"{LOSS_REG_DATA}/train/{register}/step_data_{epoch}.npz": npz_writer(
                {
                    "steps": steps,
                    "means": np.asarray(record.step_means),
                    "totals": np.asarray(record.step_totals),
                    "items": np.asarray(record.step_items),
                    "skipped": skipped,
                }
            )
            for register, record in self.losses["train"].items()
        }
        for optimizer, groups in self.rates.items():
            rates = {f"lr_{group}": np.asarray(values) for group, values in groups.items()}
            norms = np.asarray(self.grad_norms[optimizer])
            files[f"{LR_DATA}/{optimizer}/step_data_{epoch}.npz"] = npz_writer(
                {"steps": steps, "grad_norms": norms, **rates}
            )
        return files

    def load_step_files(self, data: Path, epoch: int) -> None:
        """Restore what ``step_files`` wrote: the latest finished epoch stays visible until the next begins."""
        for register, record in self.losses["train"].items():
            with columns_of(data / f"{LOSS_REG_DATA}/train/{register}/step_data_{epoch}.npz") as stored:
                for name in ("means", "totals", "items"):
                    getattr(record, f"step_{name}").extend(stored[name].tolist())
                skipped = stored["skipped"].tolist()
        # Every register's file has the same column.
        self.skipped.extend(skipped)
        for optimizer, groups in self.rates.items():
            with columns_of(data / f"{LR_DATA}/{optimizer}/step_data_{epoch}.npz") as stored:
                self.grad_norms[optimizer].extend(stored["grad_norms"].tolist())
                for name in stored:
                    if name.startswith("lr_"):
                        groups.setdefault(name.removeprefix("lr_"), array("d")).extend(stored[name].tolist())
                for group in groups:
                    # Of an epoch before the group was added.
                    self._rates_of(optimizer, group, len(self.skipped))

    def epoch_files(self, split: str) -> dict[str, Writer]:
        """Return the files that hold one entry per finished epoch, by path below data/."""
        return {
            f"{LOSS_REG_DATA}/{split}/{register}/epoch_data.npz": npz_writer(
                {name.removeprefix("epoch_"): np.asarray(getattr(record, name)) for name in _EPOCH_FIELDS}
            )
            for register, record in self.losses[split].items()
        }

    def load_epochs(self, data: Path) -> None:
        """Restore what ``epoch_files`` wrote, for both splits."""
        for split in SPLITS:
            for register, record in self.losses[split].items():
                with columns_of(data / f"{LOSS_REG_DATA}/{split}/{register}/epoch_data.npz") as stored:
                    for name in _EPOCH_FIELDS:
                        setattr(record, name, stored[name.removeprefix("epoch_")].tolist())


def npz_writer(arrays: Mapping[str, np.ndarray]) -> Writer:
    """Return a writer of named arrays as they are now; the same arrays give the same bytes."""
    # Copies: a commit in the background writes them while the next steps are recorded.
    return partial(_write_npz, {name: np.array(values) for name, values in arrays.items()})


def _write_npz(arrays: Mapping[str, np.ndarray], file: BinaryIO) -> None:
    # Through memory: numpy would seek in a file, which a writer of the store need not allow.
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    file.write(buffer.getvalue())
