"""The status file: small, always whole, for anyone who wants to see a run without touching it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from pipeline.progress import Progress
from pipeline.system.files import read_regular, replace_text
from pipeline.system.logging import LOGGER

SECONDS_BETWEEN_UPDATES = 2.0


class StatusFile:
    """Replaced as a whole at each update; a failure to write it never stops the training."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = float("-inf")
        self._has_warned = False

    def is_due(self) -> bool:
        return time.monotonic() - self._written >= SECONDS_BETWEEN_UPDATES

    def write(self, **values: Any) -> None:
        """Replace what the file says."""
        self._written = time.monotonic()
        content = json.dumps({**values, "updated": time.strftime("%Y-%m-%d %H:%M:%S%z")}, indent=1) + "\n"
        try:
            replace_text(self._path, content)
        except OSError as error:
            if not self._has_warned:
                LOGGER.warning("The status file cannot be written: %s. Training continues.", error)
            self._has_warned = True


def read_status(path: Path) -> dict[str, Any]:
    """Return the latest status as far as it makes sense, or nothing."""
    try:
        status = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return {name: value for name, value in status.items() if _fits(name, value)} if isinstance(status, dict) else {}


def _fits(name: str, value: Any) -> bool:
    """Return whether a value is of the kind that its name promises; anyone may have written the file."""
    if name == "last":
        return _are_losses(value)
    if name == "best":
        return isinstance(value, dict) and (not value or ("epoch" in value and _are_losses(value.get("values"))))
    if name == "progress":
        return _is_progress(value)
    return True


def _are_losses(value: Any) -> bool:
    return isinstance(value, dict) and all(one is None or isinstance(one, float) for one in value.values())


def _is_progress(value: Any) -> bool:
    try:
        Progress.from_json(value)
    except (KeyError, TypeError, ValueError):
        return False
    return True
