"""Data counters: statistics of the training points, counted once and saved."""

from __future__ import annotations

from pathlib import Path

import torch

from pipeline.components.datasets import DataPoint
from pipeline.components.stateful import Stateful, load_json, save_json


class BaseDataCounter(Stateful):
    """Sees the metadata of every training point of its datasets once, on rank 0, before the training.

    The result is saved, and loaded on every rank at this and every later start. Module transforms get all counters by
    name.
    """

    def count(self, dataset_name: str, metadata_point: DataPoint) -> None:
        """Take one more point into account."""
        raise TypeError(f"{type(self).__name__} must define count(dataset_name, metadata_point).")


class DatasetSizeCounter(BaseDataCounter):
    """Counts the training points of each dataset: ``counter.sizes["digits"]``."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}

    def count(self, dataset_name: str, metadata_point: DataPoint) -> None:
        self.sizes[dataset_name] = self.sizes.get(dataset_name, 0) + 1

    def save(self, folder: Path) -> None:
        save_json(folder, self.sizes)

    def load(self, folder: Path) -> None:
        self.sizes = load_json(folder)


class CategoryCounter(BaseDataCounter):
    """Counts how often each category ``0 … num_categories - 1`` occurs under ``key``."""

    def __init__(self, key: str, num_categories: int) -> None:
        self.key = key
        self.counts = [0] * num_categories

    def count(self, dataset_name: str, metadata_point: DataPoint) -> None:
        category = int(metadata_point[self.key])
        # Checked, because a negative index would silently count from the end of the list.
        if not 0 <= category < len(self.counts):
            raise ValueError(f"{self.key!r} must be from 0 to {len(self.counts) - 1}, but is {category}")
        self.counts[category] += 1

    def class_weights(self) -> torch.Tensor:
        """Return weights inverse to the frequencies, with mean 1 over the points; 0 for one that never occurs."""
        # In float64: float32 cannot hold every count above 2**24.
        counts = torch.tensor(self.counts, dtype=torch.float64)
        num_present = int((counts > 0).sum())
        # torch.where computes both branches, so the clamp keeps the unused one from dividing by zero.
        weights = torch.where(counts > 0, counts.sum() / (num_present * counts.clamp(min=1)), 0.0)
        return weights.to(torch.float32)

    def save(self, folder: Path) -> None:
        save_json(folder, {"counts": self.counts})

    def load(self, folder: Path) -> None:
        self.counts = load_json(folder)["counts"]
