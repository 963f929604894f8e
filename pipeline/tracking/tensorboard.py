"""TensorBoard event files that show one clean series however often a run was killed."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.errors import InvalidExperiment, Problem

Point = tuple[str, int, float]


def check_installed(settings_file: Path) -> None:
    """Refuse before training if TensorBoard was asked for and is not there."""
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        what = "tensorboard.enabled is true, but the package is not installed"
        raise InvalidExperiment(
            [Problem(str(settings_file), what, "pip install 'training-pipeline[tensorboard]'")]
        ) from None


class EventFile:
    """One event file per start, numbered by start rather than by a clock that may jump.

    Its first record tells readers to forget what older files say from ``purge_step`` on.
    """

    def __init__(self, folder: Path, purge_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event: Any = Event
        folder.mkdir(parents=True, exist_ok=True)
        number = 1 + max((int(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.*")), default=0)
        # Readers take the files of a folder in the order of their names.
        self._file = (folder / f"events.out.tfevents.{number:010d}.training_pipeline").open("xb")
        self._writer = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        start = SessionLog(status=SessionLog.START)
        self._write(Event(wall_time=time.time(), step=purge_step, session_log=start))
        self._file.flush()

    def publish(self, points: Iterable[Point]) -> None:
        """Add values; they are with the reader once this returns."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        for tag, step, value in points:
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            self._write(self._event(wall_time=time.time(), step=step, summary=summary))
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
