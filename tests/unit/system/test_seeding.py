"""Randomness without history: every draw is a function of a key."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from pipeline.system.seeding import keyed_permutation, seed_generators, set_deterministic


def draws(*key: object) -> tuple[float, float, float]:
    """Return the first draw of python, numpy and torch after setting a key."""
    seed_generators(*key)
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def states() -> tuple[object, ...]:
    """Return the states of the three global generators."""
    return random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()  # type: ignore[index]


def test_same_key_gives_the_same_draws() -> None:
    """Whatever was drawn before, a key leads to the same numbers."""
    first = draws(3, "step", 1)
    draws("something else")
    assert draws(3, "step", 1) == first


@pytest.mark.parametrize("other", [(4, "step", 1), (3, "step", 2), (3, "stop", 1), (3, "step"), (3, "step", "1")])
def test_other_key_gives_other_draws(other: tuple[object, ...]) -> None:
    """Every part of a key matters, in each of the three generators."""
    assert all(left != right for left, right in zip(draws(3, "step", 1), draws(*other), strict=True))


def test_generators_of_one_key_are_unrelated() -> None:
    """Python, numpy and torch do not draw the same numbers."""
    assert len(set(draws(0))) == 3


def test_neighbouring_keys_are_not_correlated() -> None:
    """Counting up an epoch does not shift the series by one."""
    series = []
    for epoch in range(20):
        seed_generators(0, epoch)
        series.append(torch.rand(50))
    assert all(abs(torch.corrcoef(torch.stack([left, right]))[0, 1]) < 0.7 for left, right in pairwise(series))


def test_permutation_is_one() -> None:
    """Every index appears once."""
    assert sorted(keyed_permutation(100, 1, "a").tolist()) == list(range(100))
    assert keyed_permutation(0, 1).tolist() == []


def test_permutation_follows_from_its_key() -> None:
    """The same key gives the same order, another key another."""
    assert np.array_equal(keyed_permutation(50, 1, "a"), keyed_permutation(50, 1, "a"))
    assert not np.array_equal(keyed_permutation(50, 1, "a"), keyed_permutation(50, 1, "b"))


def test_permutation_is_the_same_for_ever() -> None:
    """A resumed experiment must meet the order it was started with, also with another version of this program."""
    assert keyed_permutation(8, 3, "train", 1, "a").tolist() == [5, 0, 1, 2, 6, 7, 4, 3]


def test_permutation_leaves_the_global_generators_alone() -> None:
    """Planning an epoch draws nothing from anyone else."""
    before = states()
    keyed_permutation(1000, 1, "a")
    assert states() == before


def test_deterministic_kernels_can_be_demanded() -> None:
    """After the call torch refuses operations without a deterministic kernel."""
    set_deterministic()
    assert torch.are_deterministic_algorithms_enabled()
