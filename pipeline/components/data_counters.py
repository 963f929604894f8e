"""Counters: statistics of the training data, counted once and stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pipeline.components.stateful import Stateful, load_json, save_json


class BaseDataCounter(Stateful):
    """Sees the metadata of every training point of its datasets once, before training.

    The result is saved, and loaded ever after; module transforms get all counters by name.
    """

    def count(self, dataset_name: str, metadata_point: dict[str, Any]) -> None:
        """Take one more point into account."""
        raise TypeError(f"{type(self).__name__} must define count(dataset_name, metadata_point).")


class DatasetSizeCounter(BaseDataCounter):
    """Counts the training points of each dataset: ``counter.sizes["digits"]``."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}

    def count(self, dataset_name: str, metadata_point: dict[str, Any]) -> None:
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

    def count(self, dataset_name: str, metadata_point: dict[str, Any]) -> None:
        category = int(metadata_point[self.key])
        if not 0 <= category < len(self.counts):
            raise ValueError(f"{self.key!r} must be from 0 to {len(self.counts) - 1}, but is {category}")
        self.counts[category] += 1

    def class_weights(self) -> torch.Tensor:
        """Return weights inverse to the frequency, with mean 1 over the points; 0 for what never occurs."""
        counts = torch.tensor(self.counts, dtype=torch.float64)
        num_present = int((counts > 0).sum())
        weights = torch.where(counts > 0, counts.sum() / (num_present * counts.clamp(min=1)), 0.0)
        return weights.to(torch.float32)

    def save(self, folder: Path) -> None:
        save_json(folder, {"counts": self.counts})

    def load(self, folder: Path) -> None:
        self.counts = load_json(folder)["counts"]
