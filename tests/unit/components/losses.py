"""Losses as components see them, written down by hand."""

from __future__ import annotations

from pipeline.components import Losses, LossRecord


def losses_of(
    train: dict[str, list[float]] | None = None, val: dict[str, list[float]] | None = None, direction: str = "min"
) -> Losses:
    """Return finished epochs with these means: training from epoch 1 on, validation from epoch 0 on."""
    records: Losses = {"train": {}, "val": {}}
    for split, first, means in (("train", 1, train or {}), ("val", 0, val or {})):
        for register, values in means.items():
            record = records[split][register] = LossRecord(direction=direction)
            for epoch, value in enumerate(values, first):
                record.add_epoch(epoch, value, 1)
    return records


def after_epochs(*val: float, direction: str = "min") -> Losses:
    """Return the losses after as many evaluations as there are values, the first before any training."""
    return losses_of({"loss": [1.0] * (len(val) - 1)}, {"loss": list(val)}, direction)
