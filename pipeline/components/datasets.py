"""Datasets and data transforms: points as dicts, and what is done to each before it is collated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset

# The keys and types of a point are the author's choice.
DataPoint = dict[str, Any]


class BaseDataset(Dataset[DataPoint]):
    """A map-style dataset whose points are dicts, and which knows its splits.

    Define ``__getitem__(idx)`` and ``get_split_idxs(split)``. Define ``getitem_metadata(idx)`` as well if a data
    counter uses the dataset and whole points are slow to load. A dataset that can fetch many points at once may define
    ``__getitems__(idxs)``.
    """

    def __getitem__(self, idx: int) -> DataPoint:
        raise TypeError(f"{type(self).__name__} must define __getitem__(idx), which returns the data point as a dict.")

    def get_split_idxs(self, split: str) -> Sequence[int]:
        """Return the indices that belong to ``"train"``, ``"val"`` or ``"test"``."""
        raise TypeError(f"{type(self).__name__} must define get_split_idxs(split).")

    def getitem_metadata(self, idx: int) -> DataPoint:
        """Return the part of a point that data counters need; by default the whole point."""
        return self[idx]


class BaseDataTransform:
    """A transform of one data point. It returns a new point, or edits the point in place and may return None.

    It may draw from the global generators of python, numpy and torch: they are seeded for every batch.
    """

    def __call__(self, data_point: DataPoint) -> DataPoint | None:
        return data_point
