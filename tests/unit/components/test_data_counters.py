"""Counters: statistics of the training data, counted once and stored."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.components import BaseDataCounter, CategoryCounter, DatasetSizeCounter
from tests.support.running import run_inside


def counted(*categories: int, num_categories: int = 3) -> CategoryCounter:
    """Return a counter that has seen these categories."""
    counter = CategoryCounter("label", num_categories)
    for category in categories:
        counter.count("digits", {"label": category})
    return counter


def test_sizes_are_counted_per_dataset(tmp_path: Path) -> None:
    """Each dataset has a size, and it survives."""
    first, second = DatasetSizeCounter(), DatasetSizeCounter()
    for dataset in ("a", "b", "a"):
        first.count(dataset, {})
    first.save(tmp_path)
    second.load(tmp_path)
    assert second.sizes == {"a": 2, "b": 1}


def test_categories_are_counted(tmp_path: Path) -> None:
    """Numbers of any integer kind count, and the counts survive."""
    first, second = counted(0, 2, 2), CategoryCounter("label", 3)
    first.count("digits", {"label": np.int64(2)})
    first.count("digits", {"label": torch.tensor(0)})
    first.save(tmp_path)
    second.load(tmp_path)
    assert second.counts == [2, 0, 3]


def test_class_weights_are_inverse_to_the_frequency() -> None:
    """Three of one kind and one of another weigh one to three, with mean one over the points."""
    weights = counted(0, 0, 0, 1, num_categories=2).class_weights()
    assert weights.tolist() == pytest.approx([4 / 6, 4 / 2])
    assert (weights * torch.tensor([3.0, 1.0])).sum().item() == pytest.approx(4.0)


def test_category_that_never_occurs_weighs_nothing() -> None:
    """An absent category has weight zero, and the others still have mean one."""
    weights = counted(0, 0, 2, 2).class_weights()
    assert weights.tolist() == pytest.approx([1.0, 0.0, 1.0])


def test_class_weights_without_any_points_are_zero() -> None:
    """A counter that has seen nothing gives no NaN."""
    assert counted().class_weights().tolist() == [0.0, 0.0, 0.0]


def test_category_out_of_range_is_an_error() -> None:
    """A label that does not exist is not counted somewhere else."""
    with pytest.raises(ValueError, match="from 0 to 2"):
        counted(3)


def test_counter_without_a_count_method_says_so() -> None:
    """A subclass that forgot the method gets its signature."""
    with pytest.raises(TypeError, match=r"count\(dataset_name, metadata_point\)"):
        BaseDataCounter().count("a", {})


def test_training_points_alone_are_counted(home: Path) -> None:
    """A run counts every training point of the named datasets once, and no other."""
    run_inside(home, "--stop-after-epoch", "0")
    folder = home / "experiment_results/tiny/data/data_counter_data/sides"
    assert sum(json.loads((folder / "state.json").read_text())["counts"]) == 40 + 24
