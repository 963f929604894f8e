"""The status file of a run: small, always whole, and read by other programs only, never by a run."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.monitoring.json_values import BestEpoch, as_int, as_losses, as_number, as_progress
from pipeline.progress import Progress
from pipeline.store.lock import read_json
from pipeline.system.files import replace_text
from pipeline.system.logging import LOGGER

SECONDS_BETWEEN_UPDATES = 2.0


class StatusFile:
    """Replaces the whole file at each update; a failure to write it never stops the training."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = float("-inf")
        self._has_warned = False

    def is_due(self) -> bool:
        return time.monotonic() - self._written >= SECONDS_BETWEEN_UPDATES

    def write(self, **values: object) -> None:
        """Replace the file's content by these values and the time."""
        # Set before the write: a disk that refuses is tried again at the next update, not at the next step.
        self._written = time.monotonic()
        content = json.dumps({**values, "updated": time.strftime("%Y-%m-%d %H:%M:%S%z")}, indent=1) + "\n"
        try:
            replace_text(self._path, content)
        except OSError as error:
            if not self._has_warned:
                LOGGER.warning("The status file cannot be written: %s. Training continues.", error)
            self._has_warned = True


@dataclass(frozen=True)
class Status:
    """The latest status of a run; a field is None if the file does not have it, or has something else there."""

    progress: Progress | None = None
    last: dict[str, float | None] = field(default_factory=dict)
    best: BestEpoch | None = None
    num_steps: int | None = None
    max_epochs: int | None = None
    step_seconds: float | None = None
    eta_seconds: float | None = None
    epoch_eta_seconds: float | None = None
    updated: object = None
    # Everything that was written, for those who want it as JSON.
    content: dict[str, object] = field(default_factory=dict)


def read_status(path: Path) -> Status:
    """Return the latest status; what is not a status is left out of it."""
    written = read_json(path)
    progress = as_progress(written.get("progress"))
    last = as_losses(written.get("last"))
    best = BestEpoch.from_json(written.get("best"))
    # Scripts that read the JSON may rely on these three; other values are passed on as they are.
    # An empty best is what a run writes before its first evaluation.
    has_best = best is not None or written.get("best") == {}
    fits = {"progress": progress is not None, "last": last is not None, "best": has_best}
    return Status(
        progress=progress,
        last=last or {},
        best=best,
        num_steps=as_int(written.get("num_steps")),
        max_epochs=as_int(written.get("max_epochs")),
        step_seconds=as_number(written.get("step_seconds")),
        eta_seconds=as_number(written.get("eta")),
        epoch_eta_seconds=as_number(written.get("epoch_eta")),
        updated=written.get("updated"),
        content={name: value for name, value in written.items() if fits.get(name, True)},
    )
