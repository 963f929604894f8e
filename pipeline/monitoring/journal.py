"""The journal: how long epochs took and how each start of an experiment ended, one JSON line each.

It lies among the logs, because a resume does not need it and no two runs write the same.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

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

    def note(self, kind: str, **facts: Any) -> None:
        """Write down one event of the start in hand."""
        event = {"kind": kind, "start": self.start, "rank": self.rank, "time": _now(), **facts}
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


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Return every event that can be read; a kill may have torn the last one."""
    try:
        lines = read_regular(path).decode(errors="replace").splitlines()
    except OSError:
        return []
    events = (_parsed(line) for line in lines)
    return [event for event in events if isinstance(event.get("kind"), str)]


def _parsed(line: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return event if isinstance(event, dict) else {}


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S%z")
