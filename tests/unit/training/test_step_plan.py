"""The plan of an epoch: every point once, all datasets together, the same for any number of processes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.experiment.pymodules.definitions import LoaderArguments
from pipeline.training.step_plan import BatchRef, EpochPoints, SplitShape, StepPlan, assign_rounds, evaluation_refs

SHAPES = (SplitShape("a", 40, 4, 1), SplitShape("b", 23, 3, 1))
INDICES = {"a": np.arange(100, 140), "b": np.arange(500, 523)}

shapes = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 9), st.integers(1, 4)).filter(lambda one: one[0] < 200),
    min_size=1,
    max_size=4,
).map(lambda found: [SplitShape(f"d{number}", *one) for number, one in enumerate(found)])


def steps_of(plan: StepPlan) -> list[list[BatchRef]]:
    """Return all steps of a plan."""
    return [plan.step(index) for index in range(len(plan))]


def points_of(plan: StepPlan, epoch: int, seed: int = 3) -> list[tuple[str, int]]:
    """Return every point of an epoch in the order of the plan."""
    points = EpochPoints(seed, epoch, "train", INDICES, is_shuffled=True)
    batches = [points.batch(ref) for step in steps_of(plan) for ref in step]
    return [(batch.dataset, index) for batch in batches for index in batch.indices]


def test_every_point_is_taken_exactly_once() -> None:
    """An epoch neither drops nor repeats a point, the last small batches included."""
    expected = {(name, index) for name, indices in INDICES.items() for index in indices.tolist()}
    found = points_of(StepPlan(SHAPES, 14), 1)
    assert len(found) == len(expected)
    assert set(found) == expected


@pytest.mark.parametrize("step_min_items", [1, 4, 14, 50, 10_000])
def test_steps_hold_enough_items_except_the_last(step_min_items: int) -> None:
    """A step takes batches until it holds enough, and not one batch more."""
    *steps, last = steps_of(StepPlan(SHAPES, step_min_items))
    for step in steps:
        assert sum(ref.num_items for ref in step) >= step_min_items
        assert sum(ref.num_items for ref in step[:-1]) < step_min_items
    assert last


def test_one_step_may_hold_the_whole_epoch() -> None:
    """A minimum larger than all datasets gives one step."""
    assert len(StepPlan(SHAPES, 10_000)) == 1


def test_datasets_of_different_size_end_together() -> None:
    """The smaller dataset is spread over the epoch instead of being used up early."""
    steps = steps_of(StepPlan((SplitShape("big", 1000, 5, 1), SplitShape("small", 50, 5, 1)), 50))
    halves = steps[: len(steps) // 2], steps[len(steps) // 2 :]
    assert [sum(ref.shape.dataset == "small" for step in half for ref in step) for half in halves] == [5, 5]


def test_point_size_counts_as_items() -> None:
    """A data point that stands for several items fills a step sooner."""
    single, triple = (StepPlan([SplitShape("a", 30, 2, size)], 12) for size in (1, 3))
    assert [len(step) for step in steps_of(single)] == [6, 6, 3]
    assert [len(step) for step in steps_of(triple)] == [2] * 7 + [1]
    assert sum(ref.num_items for step in steps_of(triple) for ref in step) == 90


def test_last_batch_may_be_smaller() -> None:
    """Ten points in batches of four are four, four and two."""
    shape = SplitShape("a", 10, 4, 2)
    assert [shape.num_items(number) for number in range(shape.num_batches)] == [8, 8, 4]


def test_shape_is_that_of_the_loader_arguments() -> None:
    """The plan knows the split's size and how it is cut."""
    shape = SplitShape.of("a", [5, 6, 7], LoaderArguments(batch_size=2, point_size=3))
    assert shape == SplitShape("a", 3, 2, 3)


def test_dataset_without_points_takes_no_part() -> None:
    """An empty split neither blocks the plan nor appears in it."""
    plan = StepPlan([*SHAPES, SplitShape("none", 0, 4, 1)], 14)
    assert {ref.shape.dataset for step in steps_of(plan) for ref in step} == {"a", "b"}


@pytest.mark.parametrize("world_size", range(1, 6))
def test_ranks_together_have_the_plan(world_size: int) -> None:
    """Whatever the number of processes, each batch belongs to exactly one of them."""
    plan = StepPlan(SHAPES, 14)
    dealt = Counter(ref for rank in range(world_size) for ref in plan.refs_of(rank, world_size, 0))
    assert dealt == Counter(ref for step in steps_of(plan) for ref in step)
    assert set(dealt.values()) == {1}


@pytest.mark.parametrize("world_size", range(1, 6))
def test_every_rank_gets_its_share_of_each_step(world_size: int) -> None:
    """In each step the numbers of batches differ by one at most, and may be none."""
    plan = StepPlan(SHAPES, 6)
    for step in steps_of(plan):
        shares = [len(step[rank::world_size]) for rank in range(world_size)]
        assert max(shares) - min(shares) <= 1
    assert (world_size <= 2) or any(len(step) < world_size for step in steps_of(plan))


def test_rank_beyond_the_batches_gets_none() -> None:
    """More processes than batches leave some without work, but not the plan without batches."""
    plan = StepPlan([SplitShape("a", 6, 2, 1)], 2)
    assert [len(list(plan.refs_of(rank, 3, 0))) for rank in range(3)] == [3, 0, 0]


@pytest.mark.parametrize("first_step", [0, 1, 3])
def test_resumed_rank_gets_what_is_left(first_step: int) -> None:
    """From a step on, a rank gets exactly what it would have got without a stop."""
    plan = StepPlan(SHAPES, 14)
    expected = [ref for step in steps_of(plan)[first_step:] for ref in step[(len(step) + 1) // 2 :]]
    assert list(plan.refs_of(1, 2, first_step)) == expected


def test_most_batches_is_the_largest_step() -> None:
    """Buffers are made for the step that needs most."""
    plan = StepPlan(SHAPES, 14)
    assert plan.max_batches == max(len(step) for step in steps_of(plan))


def test_same_key_gives_the_same_order() -> None:
    """An epoch planned again holds the same points in the same batches."""
    plan = StepPlan(SHAPES, 14)
    assert points_of(plan, 2) == points_of(StepPlan(SHAPES, 14), 2)


def test_epochs_and_seeds_give_different_orders() -> None:
    """Each epoch shuffles anew, and each seed differently."""
    plan = StepPlan(SHAPES, 14)
    orders = [points_of(plan, epoch, seed) for epoch, seed in ((1, 3), (2, 3), (1, 4))]
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]


def test_datasets_of_one_size_are_shuffled_differently() -> None:
    """The order of one dataset says nothing about that of another."""
    points = EpochPoints(0, 1, "train", {"a": np.arange(50), "b": np.arange(50)}, is_shuffled=True)
    first, second = (points.batch(BatchRef(SplitShape(name, 50, 50, 1), 0)).indices for name in "ab")
    assert first != second


def test_validation_keeps_its_order() -> None:
    """Nothing is shuffled where nothing is learned."""
    points = EpochPoints(0, 1, "val", INDICES, is_shuffled=False)
    assert points.batch(BatchRef(SHAPES[0], 1)).indices == (104, 105, 106, 107)


def test_keys_of_all_batches_differ() -> None:
    """No two batches of an experiment draw the same random numbers."""
    refs = [ref for step in steps_of(StepPlan(SHAPES, 14)) for ref in step]
    both = [
        EpochPoints(0, epoch, split, INDICES, is_shuffled=False).batch(ref).key
        for epoch in (1, 2)
        for split in ("train", "val")
        for ref in refs
    ]
    assert len(set(both)) == 4 * len(refs)


def test_evaluation_takes_every_batch_once() -> None:
    """An evaluation walks through all datasets from the first batch to the last."""
    refs = evaluation_refs(SHAPES)
    assert [ref.number for ref in refs] == [*range(10), *range(8)]
    assert sum(ref.num_items for ref in refs) == 40 + 23


@given(shapes, st.integers(1, 80))
def test_any_datasets_give_a_whole_plan(found: list[SplitShape], step_min_items: int) -> None:
    """For any sizes: each batch once, in order within its dataset, and every step but the last is full."""
    plan = StepPlan(found, step_min_items)
    steps = steps_of(plan) if any(shape.num_points for shape in found) else []
    for shape in found:
        numbers = [ref.number for step in steps for ref in step if ref.shape == shape]
        assert numbers == list(range(shape.num_batches))
    assert all(sum(ref.num_items for ref in step) >= step_min_items for step in steps[:-1])
    assert all(steps)


@given(shapes)
def test_any_datasets_progress_together(found: list[SplitShape]) -> None:
    """At any moment no dataset is ahead of another by more than one batch of either."""
    plan = StepPlan(found, 1)
    done = {shape.dataset: 0 for shape in found if shape.num_points}
    total = {shape.dataset: shape.num_batches for shape in found}
    largest = max((1 / total[name] for name in done), default=0)
    for step in steps_of(plan) if done else []:
        for ref in step:
            done[ref.shape.dataset] += 1
            fractions = [done[name] / total[name] for name in done]
            assert max(fractions) - min(fractions) <= largest + 1e-12


@given(shapes, st.integers(1, 80), st.integers(1, 5))
def test_any_number_of_processes_shares_the_same_plan(
    found: list[SplitShape], step_min_items: int, world_size: int
) -> None:
    """The ranks' batches, put together step by step, are the plan."""
    plan = StepPlan(found, step_min_items)
    if not any(shape.num_points for shape in found):
        return
    dealt = Counter(ref for rank in range(world_size) for ref in plan.refs_of(rank, world_size, 0))
    assert dealt == Counter(ref for step in steps_of(plan) for ref in step)


@given(shapes, st.integers(1, 40), st.integers(1, 5))
def test_rounds_keep_ranks_together(found: list[SplitShape], step_min_items: int, world_size: int) -> None:
    """In each round all ranks run the same dataset, every batch counts once, and only a stand-in is run again."""
    plan = StepPlan(found, step_min_items)
    for index in range(len(plan)):
        batches = list(enumerate(plan.step(index)))
        dealt = [assign_rounds(batches, rank, world_size) for rank in range(world_size)]
        assert len({len(turns) for turns in dealt}) == 1
        for turns in zip(*dealt, strict=True):
            assert len({turn.ref.shape.dataset for turn in turns}) == 1
            assert all(turn.ref == turns[0].ref for turn in turns if turn.is_stand_in)
        counted = [(turn.position, turn.ref) for turns in dealt for turn in turns if not turn.is_stand_in]
        assert sorted(counted, key=lambda one: one[0]) == batches
