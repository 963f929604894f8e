"""Rows: what embed of a module transform returns for the items of a batch, checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from pipeline.errors import BrokenContract, Problem
from pipeline.experiment.pymodules.user_code import place_of

Rows = dict[str, torch.Tensor]
_REDUCED = (torch.float16, torch.bfloat16)


class RowKind(NamedTuple):
    """What the rows of one name are, in every batch of a dataset."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def kinds_of(rows: Rows) -> tuple[RowKind, ...]:
    """Return what rows there are, in the order of their names."""
    return tuple(RowKind(name, row.dtype, tuple(row.shape[1:])) for name, row in sorted(rows.items()))


def row_bytes(kinds: tuple[RowKind, ...]) -> int:
    """Return the bytes of one row, all names together."""
    return sum(kind.num_bytes for kind in kinds)


def describe_kinds(kinds: tuple[RowKind, ...]) -> str:
    return ", ".join(f"{kind.name} {kind.shape} {str(kind.dtype).removeprefix('torch.')}" for kind in kinds)


def as_float32(rows: Rows) -> Rows:
    """Return rows as ``loss`` sees them: a loss over many rows needs the range and precision of float32."""
    return {name: row.float() if row.dtype in _REDUCED else row for name, row in rows.items()}


def check_rows(rows: object, num_items: int, file: Path, device: torch.device) -> Rows:
    """Return what embed gave for a batch, if it follows the contract: tensors with one row per item."""
    if not isinstance(rows, Mapping) or not rows:
        given = "an empty dict" if isinstance(rows, Mapping) else type(rows).__name__
        raise broken_rows(file, f"must return a dict of tensors, but returned {given}", 'return {"rows": …}')
    for name, row in rows.items():
        if not isinstance(name, str):
            raise broken_rows(file, f"must name its rows by words, but has {name!r}", 'return {"rows": …}')
        if not isinstance(row, torch.Tensor):
            what = f"must return tensors, but {name!r} is {type(row).__name__}"
            raise broken_rows(file, what, "collate it into a tensor with one row per item")
        if not row.dim() or len(row) != num_items:
            what = f"must return one row per item for {name!r}, here {num_items}, but returned shape {tuple(row.shape)}"
            fix = "set point_size in dataloaders/*.py if a data point stands for several rows"
            raise broken_rows(file, what, fix)
        if row.is_complex():
            what = f"must return floats, integers or truth values, but {name!r} is {row.dtype}"
            raise broken_rows(file, what, "return real and imaginary parts, with torch.view_as_real")
        if row.device != device:
            what = f"must return {name!r} on the device of the run, {device}, but it is on {row.device}"
            raise broken_rows(file, what, "compute it from the tensors of the batch, or move it with .to(self.device)")
    return dict(rows)


def check_values(losses: object, num_rows: int, file: Path) -> None:
    """Refuse values of ``loss`` that are not one per row; all else is checked like the losses of any batch."""
    tensors = losses.items() if isinstance(losses, Mapping) else ()
    for name, value in tensors:
        if isinstance(value, torch.Tensor) and value.numel() != num_rows:
            what = f"loss must return one value per row for {name!r}, here {num_rows}, but returned a tensor of shape"
            fix = 'return a value for each row: torch\'s losses do with reduction="none"'
            raise BrokenContract(Problem(place_of(file, "loss"), f"{what} {tuple(value.shape)}", fix))


def broken_rows(file: Path, what: str, fix: str) -> BrokenContract:
    """Return the error about what embed of a module transform returned."""
    return BrokenContract(Problem(place_of(file, "embed"), f"embed {what}", fix))
