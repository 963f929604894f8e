"""Losses of batches: checked, kept as sums on the device, and added over the ranks only when needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from pipeline.distributed.processes import Processes
from pipeline.errors import BrokenContract, Problem
from pipeline.experiment.pymodules.user_code import place_of
from pipeline.system.accelerators import pinned_like


class LossAccumulator:
    """Float64 sums of the losses of batches, left on the device until someone wants to see them.

    Rows are steps. Each batch of a row is summed by one rank only, so adding over the ranks is exact, and the
    batches of a row are added in the planned order: recorded values do not depend on the number of processes.
    """

    def __init__(self, registers: Sequence[str], num_batches: int, processes: Processes) -> None:
        self._processes = processes
        self._num_batches = num_batches
        self._positions = {register: position for position, register in enumerate(registers)}
        # Row, batch and register of each sum.
        self._cells: list[tuple[int, int, int]] = []
        self._sums: list[torch.Tensor] = []
        self._fetched: torch.Tensor | None = None

    def add(self, row: int, batch: int, losses: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Record the losses of one batch and return their sums."""
        # One kernel per loss and no copy to the host: the sums of many steps are read at once.
        sums = {register: loss.detach().sum(dtype=torch.float64) for register, loss in losses.items()}
        self._sums += sums.values()
        self._cells += [(row, batch, self._positions[register]) for register in losses]
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

    def collect(self, num_rows: int) -> np.ndarray:
        """Return the totals of all rows per register, added over ranks and batches, and empty the accumulator."""
        return total_losses(self.collect_batches(num_rows))

    def collect_batches(self, num_rows: int) -> np.ndarray:
        """Return the sums of all rows per batch and register, added over ranks, and empty the accumulator."""
        table = torch.zeros(num_rows, self._num_batches, len(self._positions), dtype=torch.float64)
        if self._cells:
            sums = torch.stack(self._sums).cpu() if self._fetched is None else self._fetched
            table[tuple(torch.tensor(self._cells).T)] = sums
        self._fetched = None
        self._cells.clear()
        self._sums.clear()
        totals: np.ndarray = self._processes.sum(table).numpy()
        return totals


def total_losses(sums: np.ndarray) -> np.ndarray:
    """Add the sums of the batches of each row, in the planned order."""
    totals: np.ndarray = sums.sum(axis=1)
    return totals


def check_losses(
    losses: object, registers: tuple[str, ...], num_items: int, file: Path, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return what a module transform gave if it follows the contract: one value per item for each register."""
    if not isinstance(losses, dict):
        what = f"must return a dict of losses, but returned {type(losses).__name__}"
        raise _broken(file, what, f'return {{"{registers[0]}": …}}')
    listed = ", ".join(registers)
    if lacking := sorted(set(registers) - set(losses)):
        what = f"must return all of its loss_registers, {listed}, but lacks {', '.join(lacking)}"
        raise _broken(file, what, "return it with the others, or remove it from loss_registers")
    if unknown := sorted(map(str, set(losses) - set(registers))):
        names = ", ".join(unknown)
        what = f"must return only its loss_registers, {listed}, but also has {names}"
        fix = f"add {names} to loss_registers in this file, and to settings/loss_registers.json if there is one"
        raise _broken(file, what, fix)
    for register in registers:
        loss = losses[register]
        if not isinstance(loss, torch.Tensor) or loss.numel() != num_items:
            given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
            what = f"must return one value per item for {register!r}, here {num_items}, but returned {given}"
            raise _broken(file, *_explain_shape(loss, num_items, what))
        if loss.device != device:
            what = f"must return {register!r} on the device of the run, {device}, but it is on {loss.device}"
            raise _broken(file, what, "compute it from the tensors of the batch, or move it with .to(self.device)")
    return {register: losses[register] for register in registers}


def _broken(file: Path, what: str, fix: str) -> BrokenContract:
    return BrokenContract(Problem(place_of(file, "__call__"), what, fix))


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
