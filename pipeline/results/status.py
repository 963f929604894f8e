"""The status file: small, always whole, for anyone who wants to see a run without touching it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from pipeline.runtime.logs import LOGGER

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
        # Beside its target, so that the rename stays on one file system.
        staging = self._path.with_name(f".{self._path.name}.new")
        try:
            staging.write_text(content)
            os.replace(staging, self._path)
        except OSError as error:
            if not self._has_warned:
                LOGGER.warning("The status file cannot be written: %s. Training goes on.", error)
            self._has_warned = True


def read_status(path: Path) -> dict[str, Any]:
    """Return the latest status, or nothing."""
    try:
        status = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}
