"""Two recorded runs are compared in the order in which differences arise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.paths import ExperimentPaths
from pipeline.tracing.comparison import compare_runs, count_batches, describe_world_sizes, life_name

BATCH = {"kind": "batch", "epoch": 1, "step": 2, "rank": 0, "position": 0}
BATCH |= {"dataset": "a", "points": [3, 1], "digest": "b"}
LOSSES = {"kind": "losses", "epoch": 1, "step": 2, "rank": 0, "position": 0, "means": {"x": 0.5}, "digests": {"x": "l"}}
STEP = {"kind": "step", "epoch": 1, "step": 2, "rank": 0, "skipped": False, "norms": {"main": 1.0}, "rates": {}}
STEP |= {"loss_weights": {}, "modules": {"head": "h", "trunk": "t"}, "optimizers": {"main": "o"}}
STATE = {"kind": "components", "epoch": 1, "step": 2, "rank": 0, "states": {"loss_weighter.py: W.count": "3"}}
EVENTS: list[dict[str, Any]] = [STATE, BATCH, LOSSES, STEP]


def record(home: Path, *lives: list[dict[str, Any]]) -> ExperimentPaths:
    """Write down what the ranks of each life have seen."""
    paths = ExperimentPaths(home, "tiny")
    paths.data.mkdir(parents=True)
    for number, events in enumerate(lives):
        folder = home / life_name(number)
        folder.mkdir()
        (folder / "rank_0.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return paths


@pytest.fixture
def reference(tmp_path: Path) -> ExperimentPaths:
    return record(tmp_path / "reference", EVENTS)


def difference(reference: ExperimentPaths, home: Path, *lives: list[dict[str, Any]]) -> str | None:
    """Return how a run with these lives, of one process each, first differs."""
    return compare_runs(reference, record(home, *lives), [1] * len(lives), names_processes=False).difference


def test_same_events_have_no_difference(reference: ExperimentPaths, tmp_path: Path) -> None:
    """Batches are counted for the message."""
    assert difference(reference, tmp_path / "run", EVENTS) is None
    assert count_batches(reference) == 1


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ([{**BATCH, "points": [1, 3]}, LOSSES, STEP], "a batch of 'a' holds other points"),
        ([{**BATCH, "digest": "?"}, {**LOSSES, "digests": {"x": "?"}}, STEP], "a loaded batch of 'a' differs"),
        ([BATCH, {**LOSSES, "digests": {"x": "?"}}, {**STEP, "norms": {}}], "the losses x of a batch of 'a' differ"),
        ([BATCH, LOSSES, {**STEP, "norms": {}, "modules": {}}], "gradient norms differ, though the losses do not"),
        ([BATCH, LOSSES, {**STEP, "modules": {"head": "h", "trunk": "?"}}], "weights or buffers of trunk differ"),
        ([BATCH, LOSSES, {**STEP, "skipped": True}], "one of the two skipped the step"),
        ([BATCH, LOSSES], "the compared run does not have it"),
    ],
)
def test_first_difference_is_the_one_that_arose_first(
    reference: ExperimentPaths, tmp_path: Path, changed: list[dict[str, Any]], expected: str
) -> None:
    """What is loaded comes before losses, and losses before what the step makes of them."""
    found = difference(reference, tmp_path / "run", changed)
    assert found is not None
    assert found.startswith(f"epoch 1, step 2: {expected}")


def test_step_of_a_rank_that_the_reference_lacks_is_compared_with_rank_zero(
    reference: ExperimentPaths, tmp_path: Path
) -> None:
    """More processes are no difference, but every one of them must end its steps alike."""
    assert difference(reference, tmp_path / "same", [*EVENTS, {**STEP, "rank": 1}]) is None
    found = difference(reference, tmp_path / "other", [*EVENTS, {**STEP, "rank": 1, "modules": {}}])
    assert found == "epoch 1, step 2: weights or buffers of head, trunk differ after the step"


def test_step_that_was_done_again_counts_as_done_last(reference: ExperimentPaths, tmp_path: Path) -> None:
    """A kill undoes what its life computed after the last commit."""
    assert difference(reference, tmp_path / "run", [{**BATCH, "digest": "?"}], EVENTS) is None


def test_state_that_a_resume_lost_is_named(reference: ExperimentPaths, tmp_path: Path) -> None:
    """Only lives after a kill are looked at, and each loss is named once."""
    lost = [{**STATE, "states": {"loss_weighter.py: W.count": "0"}}, BATCH, LOSSES, STEP]
    scratch = record(tmp_path / "run", lost, lost, lost)
    comparison = compare_runs(reference, scratch, [1, 2, 1], names_processes=True)
    sentence = "pymodules/loss_weighter.py: W.count was 3 before the kill and is 0 after the resume"
    assert (comparison.difference, comparison.lost) == (None, [sentence])


def test_committed_files_are_compared_last(reference: ExperimentPaths, tmp_path: Path) -> None:
    """A difference that no rank has recorded is the work of all lives."""
    scratch = record(tmp_path / "run", EVENTS, EVENTS)
    (scratch.data / "new.json").write_text("{}")
    comparison = compare_runs(reference, scratch, [1, 2], names_processes=True)
    assert comparison.difference is not None
    assert comparison.difference.startswith("with 1 and 2 processes, data/")


def test_numbers_of_processes_are_said_in_words() -> None:
    """Each number is named once."""
    assert describe_world_sizes([1]) == "1 process"
    assert describe_world_sizes([1, 2, 3, 2]) == "1, 2 and 3 processes"
