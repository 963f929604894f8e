"""Losses of batches: checked, kept as sums on the device, and added over the ranks only when needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from pipeline.distributed.processes import Processes
from pipeline.errors import BrokenContract, Problem
from pipeline.experiment.pymodules.user_code import place_of
from pipeline.experiment.settings.settings import LossRegister
from pipeline.system.accelerators import pinned_like

# How many items a batch holds, by register.
Items = Mapping[str, int]
# What count_items of a module transform returned for a batch, unchecked; None if it has no such method.
Counts = Mapping[str, object] | None


class LossAccumulator:
    """Float64 sums of the losses of batches and their numbers of items, by batch, until someone wants to see them.

    The sums stay on the device. Rows are steps. Each batch of a row is summed by one rank only, so adding over the
    ranks is exact, and the batches of a row are added in the planned order: recorded values do not depend on the
    number of processes. A register that a batch does not have adds neither values nor items.
    """

    def __init__(self, registers: Sequence[str], num_batches: int, processes: Processes) -> None:
        self._processes = processes
        self._num_batches = num_batches
        self._positions = {register: position for position, register in enumerate(registers)}
        # Row, batch and register of each sum.
        self._cells: list[tuple[int, int, int]] = []
        self._sums: list[torch.Tensor] = []
        self._items: list[int] = []
        self._fetched: torch.Tensor | None = None

    def add(
        self,
        row: int,
        batch: int,
        losses: dict[str, torch.Tensor],
        items: Items,
        recorded: frozenset[str] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Record the losses of one batch, all or some of them, and return the sums of all."""
        # One kernel per loss and no copy to the host: the sums of many steps are read at once.
        sums = {register: loss.detach().sum(dtype=torch.float64) for register, loss in losses.items()}
        names = [register for register in losses if recorded is None or register in recorded]
        self._sums += [sums[register] for register in names]
        self._items += [items[register] for register in names]
        self._cells += [(row, batch, self._positions[register]) for register in names]
        return sums

    def find_not_finite(self, row: int) -> list[tuple[int, str]]:
        """Return batch and register of each sum of a row, on this rank, that is not finite; waits for the device."""
        names = {position: register for register, position in self._positions.items()}
        of_row = [(cell, total) for cell, total in zip(self._cells, self._sums, strict=True) if cell[0] == row]
        if not of_row:
            return []
        is_finite = torch.stack([total for _, total in of_row]).isfinite().tolist()
        return [(cell[1], names[cell[2]]) for (cell, _), fine in zip(of_row, is_finite, strict=True) if not fine]

    def fetch(self) -> None:
        """Begin to copy all sums to the host. The caller waits for the device before it collects them."""
        sums = torch.stack(self._sums) if self._sums else torch.empty(0)
        self._fetched = pinned_like(sums).copy_(sums, non_blocking=True)

    def collect(self, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Return totals and items of all rows per register, added over ranks and batches; empty the accumulator."""
        sums, items = self.collect_batches(num_rows)
        return total_losses(sums), items.sum(axis=1)

    def collect_batches(self, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Return sums and items of all rows per batch and register, added over ranks; empty the accumulator."""
        # Both in one table, and so in one message. A float64 holds every number of items up to 2 ** 53.
        table = torch.zeros(2, num_rows, self._num_batches, len(self._positions), dtype=torch.float64)
        if self._cells:
            cells = tuple(torch.tensor(self._cells).T)
            table[0][cells] = torch.stack(self._sums).cpu() if self._fetched is None else self._fetched
            table[1][cells] = torch.tensor(self._items, dtype=torch.float64)
        self._fetched = None
        self._cells.clear()
        self._sums.clear()
        self._items.clear()
        sums, items = self._processes.sum(table).numpy()
        return sums, items.astype(np.int64)


def total_losses(sums: np.ndarray) -> np.ndarray:
    """Add the sums of the batches of each row, in the planned order."""
    totals: np.ndarray = sums.sum(axis=1)
    return totals


def count_items(counts: Counts, registers: Sequence[LossRegister], num_items: int, file: Path) -> dict[str, int]:
    """Return how many items of each register a batch has.

    A register that was not counted has an item for each of the batch's ``num_items``.
    """
    items = {register.name: 1 if register.per == "batch" else num_items for register in registers}
    if counts is None:
        return items
    if not isinstance(counts, Mapping):
        raise broken_count(file, f"must return a dict of counts, but returned {type(counts).__name__}")
    countable = [register.name for register in registers if register.per == "item"]
    for name, count in counts.items():
        if name not in countable:
            raise broken_count(file, f"must return counts of {', '.join(countable) or 'no register'}, but has {name!r}")
        # What is not an integer is left as the author's code returned it.
        if type(count) is not int or count < 0:
            raise broken_count(file, f"must return an integer of 0 or more for {name!r}, but returned {count!r}")
        items[name] = count
    return items


def check_losses(
    losses: object,
    registers: Sequence[LossRegister],
    all_names: Sequence[str],
    items: Items,
    counts: Counts,
    file: Path,
    device: torch.device,
    needed: frozenset[str] | None = None,
    method: str = "__call__",
) -> dict[str, torch.Tensor]:
    """Return what a module transform gave for these registers, if it follows the contract: a value for each item.

    ``all_names`` also has the registers that it need not give now. A register may be absent if it has no item, if it is
    not optimised, or if no optimizer follows it in this turn: ``needed`` has those that one follows. Where items were
    counted there may be more values than items: torch's losses give 0 for targets that they ignore. ``method`` is the
    one that returned them.
    """
    if not isinstance(losses, dict):
        what = f"must return a dict of losses, but returned {type(losses).__name__}"
        raise _broken(file, what, f'return {{"{all_names[0]}": …}}', method)
    listed = ", ".join(all_names)
    present = [register for register in registers if register.name in losses]
    absent = [
        register.name
        for register in registers
        if register.name not in losses
        and register.optimize
        and items[register.name]
        and (needed is None or register.name in needed)
    ]
    if absent:
        what = f"must return all of its loss_registers, {listed}, but lacks {', '.join(sorted(absent))}"
        fix = (
            "return it with the others, or remove it from loss_registers; only where count_items is 0 it may be absent"
        )
        raise _broken(file, what, fix, method)
    if unknown := sorted(map(str, set(losses) - set(all_names))):
        names = ", ".join(unknown)
        what = f"must return only its loss_registers, {listed}, but also has {names}"
        fix = f"add {names} to loss_registers in this file, and to settings/loss_registers.json if there is one"
        raise _broken(file, what, fix, method)
    for register in present:
        name = register.name
        is_counted = counts is not None and name in counts
        _check_loss(losses[name], register, items[name], file, device, method, is_counted=is_counted)
    return {register.name: losses[register.name] for register in present}


def _check_loss(
    loss: object,
    register: LossRegister,
    num_items: int,
    file: Path,
    device: torch.device,
    method: str,
    *,
    is_counted: bool,
) -> None:
    name = register.name
    num_values = loss.numel() if isinstance(loss, torch.Tensor) else -1
    if register.per == "batch":
        if num_values != 1:
            what = f'must return one value per batch for {name!r}, as its "per" is "batch", but {_returned(loss)}'
            raise _broken(file, what, "return a tensor with one element, for example with .mean()", method)
    elif is_counted and num_values < num_items:
        what = f"must return a value for each of the {num_items} items that count_items gave for {name!r}"
        fix = 'use reduction="none", or count what there is a value for'
        raise _broken(file, f"{what}, but {_returned(loss)}", fix, method)
    elif not is_counted and num_values != num_items:
        what = f"must return one value per item for {name!r}, here {num_items}, but {_returned(loss)}"
        raise _broken(file, *_explain_shape(loss, num_items, what), method)
    assert isinstance(loss, torch.Tensor)
    if loss.device != device:
        what = f"must return {name!r} on the device of the run, {device}, but it is on {loss.device}"
        raise _broken(file, what, "compute it from the tensors of the batch, or move it with .to(self.device)", method)


def _returned(loss: object) -> str:
    return f"returned a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"returned {loss!r}"


def _broken(file: Path, what: str, fix: str, method: str) -> BrokenContract:
    return BrokenContract(Problem(place_of(file, method), what, fix))


def broken_count(file: Path, what: str) -> BrokenContract:
    """Return the error about what count_items of a module transform returned."""
    fix = 'return {"loss": int((batch["target"] != -100).sum())}, for example'
    return BrokenContract(Problem(place_of(file, "count_items"), f"count_items {what}", fix))


def _explain_shape(loss: object, num_items: int, what: str) -> tuple[str, str]:
    """Return what is wrong with a loss, with the likely reason, and how to repair it."""
    if not isinstance(loss, torch.Tensor):
        return what, "return a tensor"
    if loss.numel() == 1:
        return what, 'do not average over the batch: torch\'s losses return one value per item with reduction="none"'
    if loss.numel() == num_items**2:
        reason = f"{what}: outputs and targets of different shapes were broadcast"
        return reason, "give both one shape before they are compared, for example with outputs[:, 0]"
    fix = "average what belongs to one item, for example with .flatten(1).mean(dim=1)"
    return what, f"{fix}, or set point_size in dataloaders/*.py if a data point stands for several items"
