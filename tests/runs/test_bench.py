"""The benchmark measures what it says: contenders train in turn, and ours do the same work as the loop by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.driver import HAND_WRITTEN, PIPELINE, play, table
from benchmarks.large_state import first_steps
from benchmarks.rows import Row, Spread, as_text, ratios
from benchmarks.turns import Job

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["tiny", "many"])
def test_contenders_train_in_turn(kind: str, tmp_path: Path) -> None:
    """Each reports one line per counted epoch, and leaves no process behind."""
    jobs = [Job(kind, name, str(tmp_path), num_epochs=4) for name in (HAND_WRITTEN, PIPELINE)]
    with table(jobs) as contenders:
        facts = play(contenders, 2)
    assert {name: len(own) for name, own in facts.items()} == {HAND_WRITTEN: 2, PIPELINE: 2}
    assert all(one["seconds"] > 0 and one["memory"] > 0 for own in facts.values() for one in own)


def test_starts_are_timed_until_the_first_step(tmp_path: Path) -> None:
    """A contender that marks its steps is killed after the first."""
    jobs = [Job("tiny", name, str(tmp_path), num_epochs=1, marks_steps=True) for name in (HAND_WRITTEN, PIPELINE)]
    times = first_steps(jobs, 1)
    assert all(len(own) == 1 and own[0] > 0 for own in times.values())


def test_table_shows_medians_and_spread() -> None:
    """A row has a cell for each contender that took part."""
    row = Row("a  steps/s", "≥ 0.95", {PIPELINE: ratios([2.0, 3.0, 4.0], [2.0, 2.0, 2.0])})
    assert row.cells[PIPELINE] == Spread(1.5, 1.25, 1.75)
    assert "| 1.50 (1.25–1.75) |" in as_text([row])
