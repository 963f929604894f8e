"""Errors are sentences, and each kind has its exit code."""

from __future__ import annotations

import pickle

import pytest

from pipeline.errors import (
    DamagedResults,
    InvalidExperiment,
    PipelineError,
    Problem,
    StateConflict,
    UsageError,
    nearest,
)

PROBLEMS = [Problem("a.json:3", "key 'x' is missing"), Problem("b.py", "is empty", "write it")]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PipelineError("x"), 1),
        (DamagedResults("x"), 1),
        (InvalidExperiment(PROBLEMS), 2),
        (UsageError("x"), 2),
        (StateConflict("x"), 3),
    ],
)
def test_kind_of_error_is_its_exit_code(error: PipelineError, code: int) -> None:
    """Schedulers read the kind of a refusal from the exit code."""
    assert error.exit_code == code


def test_all_problems_are_listed_and_counted() -> None:
    """An invalid experiment shows every problem with its place and its fix."""
    text = str(InvalidExperiment(PROBLEMS))
    assert "2 problems" in text
    assert "1. a.json:3: key 'x' is missing" in text
    assert "2. b.py: is empty\n    fix: write it" in text


def test_one_problem_is_counted_in_the_singular() -> None:
    """One problem is a problem, not problems."""
    assert "1 problem.\n" in str(InvalidExperiment(PROBLEMS[:1]))


def test_usage_error_shows_sentence_and_fix() -> None:
    """A wrong command line is reported without a list around it."""
    assert str(UsageError("No such thing.", "make one")) == "No such thing.\n  fix: make one"


@pytest.mark.parametrize(
    "error", [PipelineError("x"), InvalidExperiment(PROBLEMS), UsageError("x", "y"), StateConflict("z")]
)
def test_error_survives_the_way_to_other_processes(error: PipelineError) -> None:
    """Ranks send refusals to one another, so they must come out of a pickle as they went in."""
    copied = pickle.loads(pickle.dumps(error.shared()))
    assert type(copied) is type(error)
    assert str(copied) == str(error)
    assert copied.is_shared


def test_nearest_names_the_closest_word() -> None:
    """A misspelt word gets the one that was meant."""
    assert nearest("sead", ["seed", "precision"]) == " Did you mean 'seed'?"


def test_nearest_says_nothing_when_nothing_is_close() -> None:
    """A word unlike all others gets no advice rather than a wrong one."""
    assert nearest("xyz", ["seed", "precision"]) == ""
