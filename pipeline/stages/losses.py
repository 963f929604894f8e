"""Losses of batches: checked, kept as sums on the device, and added over the ranks only when needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pipeline.errors import PipelineError
from pipeline.runtime.processes import Processes


class LossLedger:
    """Float64 sums of the losses, one cell per row, batch and register.

    Each cell is filled by one rank only, so adding over the ranks is exact, and the sums over a row's
    batches are taken in the planned order: recorded values do not depend on the number of processes.
    """

    def __init__(self, registers: Sequence[str], shape: tuple[int, int], processes: Processes) -> None:
        self._processes = processes
        self._positions = {register: position for position, register in enumerate(registers)}
        self._cells = torch.zeros(*shape, len(registers), dtype=torch.float64, device=processes.device)

    @property
    def num_rows(self) -> int:
        return self._cells.shape[0]

    def add(self, row: int, batch: int, losses: dict[str, torch.Tensor]) -> torch.Tensor:
        """Record the losses of one batch and return the sum over all of them, which is not finite if any is not."""
        sums = torch.stack([loss.detach().sum(dtype=torch.float64) for loss in losses.values()])
        cells = self._cells[row, batch]
        if len(losses) == len(cells) and list(losses) == list(self._positions):
            cells.copy_(sums)
        else:
            cells[[self._positions[register] for register in losses]] = sums
        return sums.sum()

    def collect(self, num_rows: int) -> np.ndarray:
        """Return the totals of the first rows per register, added over ranks and batches, and empty them."""
        cells = self._processes.sum(self._cells[:num_rows].clone()).cpu().numpy()
        self._cells[:num_rows] = 0
        totals: np.ndarray = cells.sum(axis=1)
        return totals


def checked_losses(losses: Any, registers: tuple[str, ...], num_items: int, where: str) -> dict[str, torch.Tensor]:
    """Return what a module transform gave if it follows the contract: one value per item for each register."""
    if not isinstance(losses, dict) or set(losses) != set(registers):
        given = sorted(losses) if isinstance(losses, dict) else type(losses).__name__
        raise PipelineError(f"{where} must return losses for {sorted(registers)} as a dict, but returned {given}.")
    for register in registers:
        loss = losses[register]
        if not isinstance(loss, torch.Tensor) or loss.numel() != num_items:
            given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
            raise PipelineError(
                f"{where} must return one value per item for {register!r}, here {num_items}, but returned {given} instead. "
                "Do not average over the batch; set point_size if a data point stands for several items."
            )
    return {register: losses[register] for register in registers}
