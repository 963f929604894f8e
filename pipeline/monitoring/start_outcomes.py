"""How each start of an experiment went: what it recorded when it began, and what the journal has of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime

from pipeline.lifecycle.starts import Start, differences
from pipeline.monitoring.journal import END, START, Event
from pipeline.monitoring.json_values import as_progress
from pipeline.progress import Progress

FINISHED = "finished"
STOPPED = "stopped"
FAILED = "failed"
KILLED = "killed"
RUNNING = "running"
UNKNOWN = "unknown"
_MAX_ERROR_CHARACTERS = 20_000


@dataclass(frozen=True)
class RankError:
    """The error that one rank noted."""

    rank: int | None
    error: str


@dataclass(frozen=True)
class StartOutcome:
    """One start: where it began, what it recorded of its surroundings, and how it ended."""

    number: int
    progress: Progress | None
    recorded: Start
    changed: list[str]
    outcome: str
    reason: str | None
    errors: list[RankError]
    began: str
    seconds: float | None

    def end_to_json(self) -> dict[str, object]:
        """Return how the start ended."""
        return {"outcome": self.outcome, "reason": self.reason, "errors": [asdict(error) for error in self.errors]}


def describe_starts(starts: Sequence[Start], journal: Sequence[Event], *, is_alive: bool) -> list[StartOutcome]:
    """Return one entry per start, the first start first; only the last one can be the run that is alive."""
    outcomes = []
    before: Start = {}
    for number, start in enumerate(starts, 1):
        events = [event for event in journal if event.start == number]
        # A line of the list that cannot be read is kept there as it is, and says nothing here.
        recorded: Start = {} if "unreadable" in start else start
        outcome, reason = _find_end(events, is_alive=is_alive and number == len(starts))
        # Listed as written: the process that failed first comes first, the others only report its loss.
        failures = [(event.rank, str(event.facts["error"])) for event in events if event.facts.get("error")]
        began = _parse_time(start.get("time"))
        last = _parse_time(events[-1].facts.get("time")) if events else None
        outcomes.append(
            StartOutcome(
                number=number,
                progress=as_progress(recorded.get("from")),
                recorded=recorded,
                changed=list(differences(before, recorded).values()),
                outcome=outcome,
                reason=reason,
                errors=[RankError(rank, error[:_MAX_ERROR_CHARACTERS]) for rank, error in failures],
                began=str(start.get("time", "")),
                seconds=(last - began).total_seconds() if began and last else None,
            )
        )
        before = start
    return outcomes


def _find_end(events: list[Event], *, is_alive: bool) -> tuple[str, str | None]:
    """Return the outcome of a start and its reason."""
    ends = [event for event in events if event.kind == END]
    # A rank may fail while it leaves, when the others have ended well: that does not undo their outcome.
    # Among equals rank zero decides: it speaks for all ranks.
    ranked = [(event.facts.get("outcome") == FAILED, event.rank != 0) for event in ends]
    if ends:
        end = ends[ranked.index(min(ranked))]
        reason = end.facts.get("reason")
        return str(end.facts.get("outcome")), str(reason) if reason else None
    if is_alive:
        return RUNNING, None
    # Without a note of its start the journal itself is gone, which does not prove a kill.
    was_noted = any(event.kind == START for event in events)
    return KILLED if was_noted else UNKNOWN, None


def _parse_time(text: object) -> datetime | None:
    try:
        return datetime.strptime(str(text), "%Y-%m-%d %H:%M:%S%z")
    except ValueError:
        return None
