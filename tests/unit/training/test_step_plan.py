"""The plan of an epoch: every point once, all datasets together, the same for any number of processes."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.experiment.pymodules.definitions import LoaderArguments
from pipeline.experiment.settings.settings import LoggingSettings, Settings, TrainingSettings
from pipeline.training.batch_points import EndlessPoints, EpochPoints
from pipeline.training.step_plan import (
    PLAN_VERSION,
    BatchRef,
    EndlessPlan,
    MixturePlan,
    PassPlan,
    SplitShape,
    StepPlan,
    assign_rounds,
    create_plan,
    evaluation_refs,
)

SHAPES = (SplitShape("a", 40, 4, 1), SplitShape("b", 23, 3, 1))
INDICES = {"a": np.arange(100, 140), "b": np.arange(500, 523)}

shapes = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 9), st.integers(1, 4)).filter(lambda one: one[0] < 200),
    min_size=1,
    max_size=4,
).map(lambda found: [SplitShape(f"d{number}", *one) for number, one in enumerate(found)])


def steps_of(plan: StepPlan) -> list[list[BatchRef]]:
    """Return all steps of a plan."""
    return [plan.step(1, index) for index in range(plan.num_steps)]


def points_of(plan: StepPlan, epoch: int, seed: int = 3) -> list[tuple[str, int]]:
    """Return every point of an epoch in the order of the plan."""
    points = EpochPoints(seed, epoch, "train", INDICES, is_shuffled=True)
    batches = [points.batch(ref) for step in steps_of(plan) for ref in step]
    return [(batch.dataset, index) for batch in batches for index in batch.indices]


def test_every_point_is_taken_exactly_once() -> None:
    """An epoch neither drops nor repeats a point, the last small batches included."""
    expected = {(name, index) for name, indices in INDICES.items() for index in indices.tolist()}
    found = points_of(PassPlan(SHAPES, 14), 1)
    assert len(found) == len(expected)
    assert set(found) == expected


@pytest.mark.parametrize("step_min_items", [1, 4, 14, 50, 10_000])
def test_steps_hold_enough_items_except_the_last(step_min_items: int) -> None:
    """A step takes batches until it holds enough, and not one batch more."""
    *steps, last = steps_of(PassPlan(SHAPES, step_min_items))
    for step in steps:
        assert sum(ref.num_items for ref in step) >= step_min_items
        assert sum(ref.num_items for ref in step[:-1]) < step_min_items
    assert last


def test_one_step_may_hold_the_whole_epoch() -> None:
    """A minimum larger than all datasets gives one step."""
    assert PassPlan(SHAPES, 10_000).num_steps == 1


def test_datasets_of_different_size_end_together() -> None:
    """The smaller dataset is spread over the epoch instead of being used up early."""
    steps = steps_of(PassPlan((SplitShape("big", 1000, 5, 1), SplitShape("small", 50, 5, 1)), 50))
    halves = steps[: len(steps) // 2], steps[len(steps) // 2 :]
    assert [sum(ref.shape.dataset == "small" for step in half for ref in step) for half in halves] == [5, 5]


def test_point_size_counts_as_items() -> None:
    """A data point that stands for several items fills a step sooner."""
    single, triple = (PassPlan([SplitShape("a", 30, 2, size)], 12) for size in (1, 3))
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
    plan = PassPlan([*SHAPES, SplitShape("none", 0, 4, 1)], 14)
    assert {ref.shape.dataset for step in steps_of(plan) for ref in step} == {"a", "b"}


@pytest.mark.parametrize("world_size", range(1, 6))
def test_ranks_together_have_the_plan(world_size: int) -> None:
    """Whatever the number of processes, each batch belongs to exactly one of them."""
    plan = PassPlan(SHAPES, 14)
    dealt = Counter(ref for rank in range(world_size) for ref in plan.refs_of(1, rank, world_size, 0))
    assert dealt == Counter(ref for step in steps_of(plan) for ref in step)
    assert set(dealt.values()) == {1}


@pytest.mark.parametrize("world_size", range(1, 6))
def test_every_rank_gets_its_share_of_each_step(world_size: int) -> None:
    """In each step the numbers of batches differ by one at most, and may be none."""
    plan = PassPlan(SHAPES, 6)
    for step in steps_of(plan):
        shares = [len(step[rank::world_size]) for rank in range(world_size)]
        assert max(shares) - min(shares) <= 1
    assert (world_size <= 2) or any(len(step) < world_size for step in steps_of(plan))


def test_rank_beyond_the_batches_gets_none() -> None:
    """More processes than batches leave some without work, but not the plan without batches."""
    plan = PassPlan([SplitShape("a", 6, 2, 1)], 2)
    assert [len(list(plan.refs_of(1, rank, 3, 0))) for rank in range(3)] == [3, 0, 0]


@pytest.mark.parametrize("first_step", [0, 1, 3])
def test_resumed_rank_gets_what_is_left(first_step: int) -> None:
    """From a step on, a rank gets exactly what it would have got without a stop."""
    plan = PassPlan(SHAPES, 14)
    expected = [ref for step in steps_of(plan)[first_step:] for ref in step[(len(step) + 1) // 2 :]]
    assert list(plan.refs_of(1, 1, 2, first_step)) == expected


def test_most_batches_is_the_largest_step() -> None:
    """Buffers are made for the step that needs most."""
    plan = PassPlan(SHAPES, 14)
    assert plan.max_batches == max(len(step) for step in steps_of(plan))


def test_same_key_gives_the_same_order() -> None:
    """An epoch planned again holds the same points in the same batches."""
    plan = PassPlan(SHAPES, 14)
    assert points_of(plan, 2) == points_of(PassPlan(SHAPES, 14), 2)


def test_epochs_and_seeds_give_different_orders() -> None:
    """Each epoch shuffles anew, and each seed differently."""
    plan = PassPlan(SHAPES, 14)
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
    refs = [ref for step in steps_of(PassPlan(SHAPES, 14)) for ref in step]
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
    plan = PassPlan(found, step_min_items)
    steps = steps_of(plan) if any(shape.num_points for shape in found) else []
    for shape in found:
        numbers = [ref.number for step in steps for ref in step if ref.shape == shape]
        assert numbers == list(range(shape.num_batches))
    assert all(sum(ref.num_items for ref in step) >= step_min_items for step in steps[:-1])
    assert all(steps)


@given(shapes)
def test_any_datasets_progress_together(found: list[SplitShape]) -> None:
    """At any moment no dataset is ahead of another by more than one batch of either."""
    plan = PassPlan(found, 1)
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
    plan = PassPlan(found, step_min_items)
    if not any(shape.num_points for shape in found):
        return
    dealt = Counter(ref for rank in range(world_size) for ref in plan.refs_of(1, rank, world_size, 0))
    assert dealt == Counter(ref for step in steps_of(plan) for ref in step)


@given(shapes, st.integers(1, 40), st.integers(1, 5))
def test_rounds_keep_ranks_together(found: list[SplitShape], step_min_items: int, world_size: int) -> None:
    """In each round all ranks run the same dataset, every batch counts once, and only a stand-in is run again."""
    plan = PassPlan(found, step_min_items)
    for index in range(plan.num_steps):
        batches = list(enumerate(plan.step(1, index)))
        dealt = [assign_rounds(batches, rank, world_size) for rank in range(world_size)]
        assert len({len(turns) for turns in dealt}) == 1
        for turns in zip(*dealt, strict=True):
            assert len({turn.ref.shape.dataset for turn in turns}) == 1
            assert all(turn.ref == turns[0].ref for turn in turns if turn.is_stand_in)
        counted = [(turn.position, turn.ref) for turns in dealt for turn in turns if not turn.is_stand_in]
        assert sorted(counted, key=lambda one: one[0]) == batches


def endless(found: list[SplitShape]) -> list[SplitShape]:
    return [dataclasses.replace(shape, is_endless=True) for shape in found if shape.num_points]


def steps_in_order(found: list[SplitShape], step_min_items: int, num_steps: int) -> list[list[BatchRef]]:
    """Return what an endless plan must be: batch by batch from the dataset that is behind, without any arithmetic."""
    taken = [0] * len(found)
    steps = []
    for _ in range(num_steps):
        step: list[BatchRef] = []
        while sum(ref.num_items for ref in step) < step_min_items:
            progress = [taken[order] / shape.num_batches for order, shape in enumerate(found)]
            order = min(range(len(found)), key=lambda order: (round(progress[order], 9), order))
            step.append(BatchRef(found[order], taken[order]))
            taken[order] += 1
        steps.append(step)
    return steps


@given(shapes, st.integers(1, 80), st.integers(1, 7))
def test_endless_steps_are_those_of_taking_batch_after_batch(
    found: list[SplitShape], step_min_items: int, num_steps: int
) -> None:
    """Any step follows from its number alone, and is what a loop from the beginning would come to."""
    found = endless(found)
    if not found:
        return
    plan = EndlessPlan(found, step_min_items, num_steps)
    expected = steps_in_order(found, step_min_items, 40)
    asked = [plan.step(number // num_steps + 1, number % num_steps) for number in range(40)]
    assert [sorted_refs(step) for step in asked] == [sorted_refs(step) for step in expected]
    assert plan.max_batches >= max(map(len, expected))
    assert all(sum(ref.num_items for ref in step) >= step_min_items for step in asked)


def sorted_refs(step: list[BatchRef]) -> list[tuple[str, int]]:
    return sorted((ref.shape.dataset, ref.number) for ref in step)


@pytest.mark.parametrize("batch_size", [1, 4, 7, 40, 100])
def test_every_point_comes_once_in_each_pass(batch_size: int) -> None:
    """Batches are full, may span two passes and more, and no point is left out or comes twice before all have come."""
    shape = SplitShape("a", 40, batch_size, 1, is_endless=True)
    plan = EndlessPlan([shape], 12, num_steps=5)
    points = EndlessPoints(3, "train", INDICES)
    drawn: list[int] = []
    for number in range(200):
        for ref in plan.step(number // 5 + 1, number % 5):
            assert ref.num_items == len(points.batch(ref).indices) == batch_size
            drawn += points.batch(ref).indices
    passes = [drawn[first : first + 40] for first in range(0, len(drawn) - 39, 40)]
    assert len(passes) > 40
    assert all(sorted(one) == list(range(100, 140)) for one in passes)
    assert len({tuple(one) for one in passes}) == len(passes), "two passes have one order"


def test_first_pass_has_the_order_of_a_first_epoch() -> None:
    """Whoever turns passes into epochs of steps begins with the same points."""
    endless_points = EndlessPoints(3, "train", INDICES)
    epoch = EpochPoints(3, 1, "train", INDICES, is_shuffled=True)
    for number in range(10):
        endless_batch = endless_points.batch(BatchRef(SplitShape("a", 40, 4, 1, is_endless=True), number))
        assert endless_batch == epoch.batch(BatchRef(SplitShape("a", 40, 4, 1), number))


def test_points_can_be_asked_for_in_any_order() -> None:
    """A resume begins in the middle, and replay goes back."""
    shape = SplitShape("a", 40, 7, 1, is_endless=True)
    in_order = [EndlessPoints(3, "train", INDICES).batch(BatchRef(shape, number)) for number in range(60)]
    points = EndlessPoints(3, "train", INDICES)
    for number in [59, 3, 40, 2, 58, 0, 30]:
        assert points.batch(BatchRef(shape, number)) == in_order[number]


def test_keys_of_endless_batches_differ() -> None:
    """Augmentation never repeats."""
    shape = SplitShape("a", 5, 3, 1, is_endless=True)
    points = EndlessPoints(0, "train", {"a": np.arange(5)})
    keys = [points.batch(BatchRef(shape, number)).key for number in range(500)]
    assert len(set(keys)) == 500


WEIGHTS = {"a": 1.5, "b": 0.1, "c": 2}
MIXED = [SplitShape(name, 10, 2, 1, is_endless=True) for name in WEIGHTS]


def test_mixture_gives_each_dataset_its_share() -> None:
    """After any number of steps a dataset has given its weight in batches, rounded down, each batch once, in order."""
    plan = MixturePlan(MIXED, WEIGHTS, num_steps=7)
    given_so_far = Counter[str]()
    for number in range(100):
        for ref in plan.step(number // 7 + 1, number % 7):
            assert ref.number == given_so_far[ref.shape.dataset]
            given_so_far[ref.shape.dataset] += 1
        # In whole numbers: 0.1 is not a binary fraction.
        expected = {"a": (number + 1) * 15 // 10, "b": (number + 1) // 10, "c": 2 * (number + 1)}
        assert {name: given_so_far[name] for name in WEIGHTS} == expected
    assert plan.max_batches == 5


def test_different_steps_stand_for_all() -> None:
    """What holds for these holds for every step: as many batches of each dataset."""
    plans = [
        (PassPlan(SHAPES, 14), 3),
        (EndlessPlan(endless(list(SHAPES)), 14, 50), 300),
        (MixturePlan(MIXED, WEIGHTS, 50), 300),
    ]
    for plan, num_steps in plans:
        kinds = {tuple(sorted(Counter(ref.shape.dataset for ref in step).items())) for step in plan.different_steps()}
        steps = [plan.step(number // 50 + 1, number % 50) for number in range(num_steps)]
        assert {tuple(sorted(Counter(ref.shape.dataset for ref in step).items())) for step in steps} <= kinds


def test_last_step_may_be_inside_an_epoch() -> None:
    """The limit cuts the last epoch, and none before it."""
    plan = EndlessPlan(endless(list(SHAPES)), 14, num_steps=10, max_steps=23)
    assert [plan.steps_of(epoch) for epoch in range(5)] == [0, 10, 10, 3, 0]
    assert plan.last_epoch == 3
    assert [plan.steps_through(epoch) for epoch in (0, 1, 3, 9)] == [0, 10, 23, 23]
    assert [EndlessPlan(endless(list(SHAPES)), 14, 10, limit).last_epoch for limit in (None, 1, 10, 11)] == [
        None,
        1,
        1,
        2,
    ]


def test_plan_of_many_points_is_worked_out_at_once() -> None:
    """One dataset needs no table, whatever its size."""
    shape = SplitShape("a", 10**12, 256, 1, is_endless=True)
    plan = EndlessPlan([shape], 1000, num_steps=100)
    assert [ref.number for ref in plan.step(10**9, 99)] == [4 * (10**11 - 1) + number for number in range(4)]


def test_settings_choose_the_plan() -> None:
    """Without new keys, the plan is that of earlier versions."""
    settings = Settings(14, LoggingSettings(), (), TrainingSettings())
    found = endless(list(SHAPES))
    assert isinstance(create_plan(SHAPES, settings, None), PassPlan)
    by_steps = dataclasses.replace(settings, steps_per_epoch=8)
    assert isinstance(create_plan(found, by_steps, None), EndlessPlan)
    assert create_plan(found, by_steps, None).num_steps == 8
    assert create_plan(found, dataclasses.replace(by_steps, limit_batches=3), None).num_steps == 3
    assert isinstance(create_plan(found, dataclasses.replace(by_steps, mixture={"a": 1, "b": 2}), None), MixturePlan)


def shown(refs: list[BatchRef]) -> str:
    return " ".join(f"{ref.shape.dataset}{ref.number}" for ref in refs)


def test_arithmetic_of_version_1_never_changes() -> None:
    """Experiments continue with the plan they started with: another plan needs another PLAN_VERSION."""
    assert PLAN_VERSION == 1
    passing = (SplitShape("a", 10, 4, 1), SplitShape("b", 7, 2, 1))
    endless = tuple(dataclasses.replace(shape, is_endless=True) for shape in passing)
    assert list(map(shown, steps_of(PassPlan(passing, 5)))) == ["a0 b0", "b1 a1", "b2 a2 b3"]
    plan: StepPlan = EndlessPlan(endless, 5, 4)
    steps = [shown(plan.step(epoch, index)) for epoch in (1, 2) for index in range(4)]
    assert steps == ["a0 b0", "b1 a1", "b2 a2", "b3 a3", "b4 b5 a4", "b6 a5", "b7 a6", "b8 b9 a7"]
    assert shown(plan.step(1000, 3)) == "b5331 a3999"
    plan = MixturePlan(endless, {"a": 1.5, "b": 0.4}, 4)
    steps = [shown(plan.step(epoch, index)) for epoch in (1, 2) for index in range(4)]
    assert steps == ["a0", "a1 a2", "a3 b0", "a4 a5", "a6 b1", "a7 a8", "a9", "a10 b2 a11"]
    assert shown(plan.step(1000, 3)) == "a5998 b1599 a5999"


def test_try_of_a_plan_of_steps_has_as_many_epochs_as_the_real_run() -> None:
    """Its epochs are shorter, so a last step that was kept would be reached after far more of them."""
    settings = Settings(1, LoggingSettings(), (), TrainingSettings(), steps_per_epoch=100)
    real = create_plan(SHAPES, settings, 600)
    tried = create_plan(SHAPES, dataclasses.replace(settings, limit_batches=2), 600)
    assert (real.last_epoch, tried.last_epoch, tried.steps_through(6)) == (6, 6, 12)


def test_weights_with_many_digits_do_not_make_a_start_slow() -> None:
    """Steps that differ are looked at up to a limit: no training gets to the end of such a period."""
    plan = MixturePlan(SHAPES, {"a": 1.3333333, "b": 0.1234567}, 4)
    assert sum(1 for _ in plan.different_steps()) <= 100_000
