"""How each start ended is told from the list of starts, the journal and the lock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.lifecycle.starts import read_starts
from pipeline.monitoring.experiment_state import read_run_owner
from pipeline.monitoring.journal import read_journal
from pipeline.monitoring.start_outcomes import RankError, StartOutcome, describe_starts
from pipeline.paths import ExperimentPaths
from pipeline.store.lock import RunLock

FROM = {"stage": "training", "epoch": 2, "step": 3}


@pytest.fixture
def paths(tmp_path: Path) -> ExperimentPaths:
    found = ExperimentPaths(tmp_path, "tiny")
    found.temp_data.mkdir(parents=True)
    found.logs.mkdir(parents=True)
    return found


def write(paths: ExperimentPaths, num_starts: int, *events: dict[str, Any]) -> None:
    said = {"time": "2026-01-01 10:00:00+0000", "from": FROM, "world_size": 1}
    starts = [json.dumps({**said, "world_size": number}) for number in range(1, num_starts + 1)]
    paths.starts_file.write_text("\n".join(starts) + "\n")
    noted = [{"time": "2026-01-01 10:01:30+0000", "rank": 0, **event} for event in events]
    paths.journal_file.write_text("".join(json.dumps(event) + "\n" for event in noted))


def outcomes(paths: ExperimentPaths) -> list[StartOutcome]:
    is_alive = read_run_owner(paths).is_alive
    return describe_starts(read_starts(paths), read_journal(paths.journal_file), is_alive=is_alive)


def event(kind: str, start: int, **facts: Any) -> dict[str, Any]:
    return {"kind": kind, "start": start, **facts}


def test_start_without_an_end_was_killed(paths: ExperimentPaths) -> None:
    """It has noted its start, nobody holds the lock, and there is no end."""
    write(paths, 2, event("start", 1), event("start", 2), event("end", 2, outcome="stopped", reason="asked"))
    first, second = outcomes(paths)
    assert (first.outcome, second.outcome, second.reason) == ("killed", "stopped", "asked")
    assert str(first.progress) == "epoch 2, training, step 3"
    assert first.seconds == 90
    assert second.changed == ["world_size 1 → 2"]


def test_last_start_runs_while_the_lock_is_held(paths: ExperimentPaths) -> None:
    """An earlier start without an end was killed all the same."""
    write(paths, 2, event("start", 1), event("start", 2))
    lock = RunLock(paths)
    lock.acquire()
    assert [start.outcome for start in outcomes(paths)] == ["killed", "running"]
    lock.release()
    assert outcomes(paths)[-1].outcome == "killed"


def test_cause_of_a_failure_comes_first(paths: ExperimentPaths) -> None:
    """The process that failed has written before those that only missed it."""
    cause = event("end", 1, outcome="failed", error="the cause", rank=1)
    write(paths, 1, event("start", 1), cause, event("end", 1, outcome="failed", error="connection lost"))
    (only,) = outcomes(paths)
    assert only.outcome == "failed"
    assert [failure.error for failure in only.errors] == ["the cause", "connection lost"]


def test_rank_zero_speaks_for_all(paths: ExperimentPaths) -> None:
    """A process that fails while the others have finished does not undo that."""
    failed = event("end", 1, outcome="failed", error="late", rank=1)
    write(paths, 1, event("start", 1), failed, event("end", 1, outcome="finished"))
    assert outcomes(paths)[0].outcome == "finished"


def test_lost_journal_is_no_proof_of_a_kill(paths: ExperimentPaths) -> None:
    """Where the logs were deleted, nobody knows how a start ended."""
    write(paths, 1)
    assert outcomes(paths)[0].outcome == "unknown"


def test_odd_lines_are_survived(paths: ExperimentPaths) -> None:
    """Torn or foreign lines of either file cost their own start at most."""
    write(paths, 1, event("end", 1, outcome=["x"], error={"a": 1}, time=None))
    paths.starts_file.write_text(paths.starts_file.read_text() + "{torn\n[1]\n")
    first, *others = outcomes(paths)
    assert first.errors == [RankError(0, "{'a': 1}")]
    assert [start.recorded for start in others] == [{}, {}]
