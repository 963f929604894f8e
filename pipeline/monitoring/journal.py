"""The journal: how long epochs took and how each start of an experiment ended, one JSON line each.

It is kept with the logs, because a resume does not need it and no two runs write the same.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from pipeline.monitoring.json_values import as_int
from pipeline.system.files import read_regular
from pipeline.system.logging import LOGGER

START = "start"
EPOCH = "epoch"
END = "end"


class Journal:
    """Appends one line at a time; a failure to write never stops the training."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path = path
        self.rank = rank
        self.start = 0
        self._has_warned = False

    def note(self, kind: str, **facts: object) -> None:
        """Append one event of the current start."""
        now = time.strftime("%Y-%m-%d %H:%M:%S%z")
        event = {"kind": kind, "start": self.start, "rank": self.rank, "time": now, **facts}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Opening a pipe would wait for a reader; one write keeps the lines of several processes apart.
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666)
            try:
                os.write(file, (json.dumps(event) + "\n").encode())
            finally:
                os.close(file)
        except OSError as error:
            if not self._has_warned:
                LOGGER.warning("The journal cannot be written: %s. Training continues.", error)
            self._has_warned = True


@dataclass(frozen=True)
class Event:
    """One line of the journal: what happened on which rank of which start; ``facts`` is the whole line."""

    kind: str
    start: int | None
    rank: int | None
    facts: dict[str, object]


def read_journal(path: Path) -> list[Event]:
    """Return every event that can be read."""
    try:
        lines = read_regular(path).decode(errors="replace").splitlines()
    except OSError:
        return []
    events = []
    for line in lines:
        try:
            facts = json.loads(line)
        except (ValueError, RecursionError):
            # A kill may have torn the last line of a start.
            continue
        if isinstance(facts, dict) and isinstance(facts.get("kind"), str):
            events.append(Event(facts["kind"], as_int(facts.get("start")), as_int(facts.get("rank")), facts))
    return events
