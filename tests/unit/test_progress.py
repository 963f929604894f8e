"""Where an experiment stands: a value with one transition."""

from __future__ import annotations

import dataclasses

import pytest

from pipeline.progress import EVALUATION, FINISHED, TRAINING, Progress


def test_stages_follow_one_another() -> None:
    """prepare → evaluation 0 → training 1 → evaluation 1 → training 2."""
    stages = [Progress()]
    for _ in range(4):
        stages.append(stages[-1].next())
    assert stages[1:] == [
        Progress(EVALUATION, 0),
        Progress(TRAINING, 1),
        Progress(EVALUATION, 1),
        Progress(TRAINING, 2),
    ]


def test_training_may_follow_training() -> None:
    """An epoch that is not evaluated is followed by the next one."""
    assert Progress(TRAINING, 3).next(evaluate=False) == Progress(TRAINING, 4)


def test_stopping_finishes_at_the_same_epoch() -> None:
    """The early stopper ends the experiment at the epoch it judged."""
    ended = Progress(EVALUATION, 7).next(stop=True)
    assert ended == Progress(FINISHED, 7)
    assert ended.is_finished


def test_next_stage_begins_at_its_first_step() -> None:
    """Steps belong to one stage and are forgotten with it."""
    assert Progress(TRAINING, 2).at_step(5).next() == Progress(EVALUATION, 2, 0)


@pytest.mark.parametrize("progress", [Progress(), Progress(TRAINING, 3, 120), Progress(FINISHED, 9)])
def test_progress_survives_json(progress: Progress) -> None:
    """What is committed is what comes back."""
    assert Progress.from_json(progress.as_json()) == progress


def test_progress_never_changes() -> None:
    """A place is a value: an experiment cannot be moved by accident."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Progress().epoch = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (Progress(TRAINING, 7, 120), "epoch 7, training, step 120"),
        (Progress(EVALUATION, 7), "epoch 7, evaluation"),
        (Progress(FINISHED, 7), "finished"),
    ],
)
def test_progress_reads_as_words(progress: Progress, text: str) -> None:
    """A refusal says in words where an experiment stands."""
    assert str(progress) == text


def test_places_are_ordered_as_they_are_reached() -> None:
    """Within an epoch training comes before its evaluation, and steps come one after the other."""
    places = [
        Progress(),
        Progress(EVALUATION),
        Progress(TRAINING, 1),
        Progress(TRAINING, 1, 3),
        Progress(EVALUATION, 1),
        Progress(TRAINING, 2),
        Progress(FINISHED, 2),
    ]
    assert sorted(places, key=lambda place: place.order) == places


def test_what_comes_next_is_said_in_words() -> None:
    """A step is counted from 1; an evaluation has no steps."""
    words = [place.describe_next() for place in (Progress(), Progress(TRAINING, 2, 3), Progress(EVALUATION, 1))]
    assert words == ["the first step", "epoch 2, step 4", "epoch 1, evaluation"]
