"""TensorBoard event files that show one clean series however often a run was killed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from pipeline.components import BaseTracker, Image, Point, TrackedRun
from pipeline.serialization.png import size_of

_COLOURS = 3


class TensorBoard(BaseTracker):
    """One event file per start; what older files say from the run's first step on is forgotten."""

    def begin(self, run: TrackedRun) -> None:
        self._events = EventFile(run.folder, run.first_step)

    def publish(self, points: list[Point]) -> None:
        self._events.add([(step, {"tag": tag, "simple_value": value}) for tag, step, value in points])

    def publish_images(self, images: list[Image]) -> None:
        self._events.add([(step, {"tag": tag, "image": _shown(png)}) for tag, step, png in images])

    def close(self) -> None:
        self._events.close()


def _shown(png: bytes) -> dict[str, Any]:
    width, height = size_of(png)
    return {"width": width, "height": height, "colorspace": _COLOURS, "encoded_image_string": png}


class EventFile:
    """One event file per start, numbered by start rather than by a clock that may jump.

    Its first record makes readers drop what older files say from ``purge_step`` on.
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

    def add(self, values: list[tuple[int, dict[str, Any]]]) -> None:
        """Add values by step; they are with the reader once this returns."""
        for step, value in values:
            self._write(self._event(wall_time=time.time(), step=step, summary={"value": [value]}))
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
