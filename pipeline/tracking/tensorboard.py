"""TensorBoard event files that show one clean series however often a run was killed."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from pipeline.components import BaseTracker, Image, Point, TrackedRun
from pipeline.experiment.settings.settings import LoggingSettings
from pipeline.serialization.png import size_of
from pipeline.system.formatting import flat

# TensorBoard's number for RGB.
_COLORSPACE = 3


class TensorBoard(BaseTracker):
    """One event file per start; readers drop what older files hold from the run's first step on."""

    @classmethod
    def from_settings(cls, logging: LoggingSettings) -> TensorBoard | None:
        return cls() if logging.tensorboard else None

    def begin(self, run: TrackedRun) -> None:
        self._events = EventFile(run.folder, run.first_step)
        if parameters := run.settings.get("parameters"):
            self._events.add_parameters(run.first_step, dict(flat(parameters)))

    def publish(self, points: list[Point]) -> None:
        self._events.add([(step, {"tag": tag, "simple_value": value}) for tag, step, value in points])

    def publish_images(self, images: list[Image]) -> None:
        values: list[tuple[int, dict[str, object]]] = []
        for tag, step, png in images:
            width, height = size_of(png)
            image = {"width": width, "height": height, "colorspace": _COLORSPACE, "encoded_image_string": png}
            values.append((step, {"tag": tag, "image": image}))
        self._events.add(values)

    def close(self) -> None:
        self._events.close()


class EventFile:
    """One event file per start, numbered by start rather than by a clock that may jump.

    Its first record makes readers drop what older files say from ``purge_step`` on.
    """

    def __init__(self, folder: Path, purge_step: int) -> None:
        # Imported here because TensorBoard is optional.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event = Event
        folder.mkdir(parents=True, exist_ok=True)
        number = 1 + max((int(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.*")), default=0)
        # Readers take the files of a folder in the order of their names.
        self._file = (folder / f"events.out.tfevents.{number:010d}.training_pipeline").open("xb")
        self._writer = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        self._write(step=purge_step, session_log=SessionLog(status=SessionLog.START))
        # At once, so that readers drop points of older files even before the first new one is published.
        self._file.flush()

    def add(self, values: list[tuple[int, dict[str, object]]]) -> None:
        """Add values by step; a reader finds them once this returns."""
        for step, value in values:
            self._write(step=step, summary={"value": [value]})
        self._file.flush()

    def add_parameters(self, step: int, parameters: Mapping[str, object]) -> None:
        """Add a row of the tab that compares runs by their parameters."""
        from torch.utils.tensorboard.summary import hparams

        # It takes numbers, booleans and text.
        values = {
            name: value if isinstance(value, (bool, int, float, str)) else json.dumps(value)
            for name, value in parameters.items()
        }
        _, parameters_at_start, _ = hparams(values, {})
        self._write(step=step, summary=parameters_at_start)
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, **fields: object) -> None:
        self._writer.write(self._event(wall_time=time.time(), **fields).SerializeToString())
