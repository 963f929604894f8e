"""MLflow: one run that every start continues, in a database below the logs or on a tracking server."""

from __future__ import annotations

import logging
import os
import re
import tempfile
import time
import uuid
from operator import attrgetter
from pathlib import Path

from pipeline.components import BaseTracker, Image, Point, TrackedRun
from pipeline.experiment.settings.settings import LoggingSettings, MlflowSettings
from pipeline.system.formatting import flat

RUN_TAG = "training_pipeline.run_id"
DATABASE = "mlflow.db"
# MLflow's limits of one request, and of the length of a value in older servers.
_MAX_METRICS = 1000
_MAX_PARAMETERS = 100
_MAX_CHARACTERS = 500
# MLflow would wait long for a server that does not answer, and training with it; and it reports its own use elsewhere.
_VARIABLES = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


class Mlflow(BaseTracker):
    """Logs what the run, which it finds again by a tag, does not have yet."""

    @classmethod
    def from_settings(cls, logging: LoggingSettings) -> Mlflow | None:
        return cls(logging.mlflow) if logging.mlflow.enabled else None

    def __init__(self, settings: MlflowSettings) -> None:
        self._settings = settings
        self._last: dict[str, int] = {}

    def begin(self, run: TrackedRun) -> int | None:
        for variable, value in _VARIABLES.items():
            os.environ.setdefault(variable, value)
        from mlflow import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._client = MlflowClient(self._settings.tracking_uri or local_database(run.folder))
        self._run_id = self._find_or_create_run(run)
        # Asked of MLflow, not remembered: at a kill, only MLflow knows which points have arrived.
        for tag in self._client.get_run(self._run_id).data.metrics:
            self._last[tag] = max(metric.step for metric in self._client.get_metric_history(self._run_id, tag))
        self._client.update_run(self._run_id, status="RUNNING")
        return max(self._last.values(), default=0)

    def _find_or_create_run(self, run: TrackedRun) -> str:
        """Return MLflow's id of the run; it is created if this is the first start."""
        from mlflow.entities import Param

        experiment = self._client.get_experiment_by_name(run.experiment)
        is_local = self._settings.tracking_uri is None
        place = (run.folder / "artifacts").as_uri() if is_local else None
        number = experiment.experiment_id if experiment else self._client.create_experiment(run.experiment, place)
        known = self._client.search_runs([number], f"tags.`{RUN_TAG}` = '{run.run_id}'")
        if known:
            return str(known[0].info.run_id)
        created = self._client.create_run(number, tags={RUN_TAG: run.run_id}, run_name=run.experiment)
        parameters = [Param(_clean_name(key), str(value)[:_MAX_CHARACTERS]) for key, value in flat(run.settings)]
        for first in range(0, len(parameters), _MAX_PARAMETERS):
            self._client.log_batch(created.info.run_id, params=parameters[first : first + _MAX_PARAMETERS])
        return str(created.info.run_id)

    def publish(self, points: list[Point]) -> None:
        from mlflow.entities import Metric

        new = [point for point in points if point.step > self._last.get(_clean_name(point.tag), -1)]
        now = int(1000 * time.time())
        # In the order of steps: if only some batches arrive before a kill, what is missing is the end of every series.
        new.sort(key=attrgetter("step"))
        metrics = [Metric(_clean_name(tag), value, now, step) for tag, step, value in new]
        for first in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + _MAX_METRICS])

    def publish_images(self, images: list[Image]) -> None:
        """Keep images as artifacts; one that is there is replaced by the same."""
        with tempfile.TemporaryDirectory() as folder:
            for image in images:
                file = Path(folder) / f"step_{image.step}.png"
                file.write_bytes(image.png)
                self._client.log_artifact(self._run_id, str(file), _clean_name(image.tag))

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def local_database(folder: Path) -> str:
    """Return the address of the database below the logs, which is created if it is missing."""
    from mlflow import MlflowClient

    # Created under another name and renamed, because MLflow refuses a database whose tables are half made.
    if not (folder / DATABASE).exists():
        for leftover in folder.glob("*.new"):
            leftover.unlink()
        staging = folder / f"{uuid.uuid4().hex}.new"
        MlflowClient(f"sqlite:///{staging}").search_experiments()
        staging.replace(folder / DATABASE)
    return f"sqlite:///{folder / DATABASE}"


def _clean_name(tag: str) -> str:
    """Return a tag with "_" for each character that MLflow does not allow."""
    return re.sub(r"[^\w./ -]", "_", tag, flags=re.ASCII)
