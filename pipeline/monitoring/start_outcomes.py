"""How each start of an experiment went: what it said of itself, and what the journal noted until its end."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pipeline.lifecycle.starts import differences, read_starts
from pipeline.monitoring.journal import END, START, read_journal
from pipeline.paths import ExperimentPaths
from pipeline.progress import Progress
from pipeline.store.lock import shows_life

FINISHED = "finished"
STOPPED = "stopped"
FAILED = "failed"
KILLED = "killed"
RUNNING = "running"
UNKNOWN = "unknown"
Event = dict[str, Any]
_MAX_CHARACTERS = 20_000


def outcomes(paths: ExperimentPaths) -> list[dict[str, Any]]:
    """Return one entry per start, the first start first."""
    starts = read_starts(paths)
    events = read_journal(paths.journal_file)
    found = []
    for number, start in enumerate(starts, 1):
        own = [event for event in events if event.get("start") == number]
        is_live = number == len(starts) and not _ends(own) and shows_life(paths)
        before = starts[number - 2] if number > 1 else {}
        found.append({"number": number, **_told(start, before), **_outcome(own, is_live), **_times(start, own)})
    return found


def _told(start: Event, before: Event) -> dict[str, Any]:
    """Return what a start said of itself; a line that cannot be read has said nothing."""
    said = {} if "unreadable" in start else start
    return {
        "from": place(said.get("from")),
        "said": said,
        "changed": list(differences(before, said).values()),
    }


def place(value: Any) -> dict[str, Any] | None:
    """Return a place in an experiment as it was noted, with its words, if it is one."""
    try:
        progress = Progress.from_json(value)
    except (KeyError, TypeError, ValueError):
        return None
    return {**progress.as_json(), "words": str(progress)}


def _ends(events: list[Event]) -> list[Event]:
    """Return how processes ended, rank zero's word first because it speaks for all when it has one."""
    ends = [event for event in events if event["kind"] == END]
    return sorted(ends, key=lambda event: (event.get("outcome") == FAILED, event.get("rank") != 0))


def _outcome(events: list[Event], is_live: bool) -> dict[str, Any]:
    ends = _ends(events)
    # The process that failed first has written first; the others only report its loss.
    failures = [event for event in events if event.get("error")]
    errors = [{"rank": event.get("rank"), "error": str(event["error"])[:_MAX_CHARACTERS]} for event in failures]
    if ends:
        reason = ends[0].get("reason")
        return {"outcome": str(ends[0].get("outcome")), "reason": str(reason) if reason else None, "errors": errors}
    was_noted = any(event["kind"] == START for event in events)
    outcome = RUNNING if is_live else KILLED if was_noted else UNKNOWN
    return {"outcome": outcome, "reason": None, "errors": errors}


def _times(start: Event, events: list[Event]) -> dict[str, Any]:
    """Return when a start began and for how long it was heard of."""
    last = events[-1].get("time") if events else None
    ends = [_time(text) for text in (start.get("time"), last)]
    seconds = (ends[1] - ends[0]).total_seconds() if ends[0] and ends[1] else None
    return {"began": str(start.get("time", "")), "seconds": seconds}


def _time(text: Any) -> datetime | None:
    try:
        return datetime.strptime(str(text), "%Y-%m-%d %H:%M:%S%z")
    except ValueError:
        return None
