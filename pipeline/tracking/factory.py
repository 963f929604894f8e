"""Which trackers a run has, and whether they can be had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from pipeline.checkpoint.records import Records
from pipeline.components import BaseTracker, TrackedRun
from pipeline.errors import InvalidExperiment, Problem
from pipeline.experiment.pymodules.loader import PymoduleLoader
from pipeline.experiment.settings.settings import LoggingSettings, Settings, parse_settings, read_contents
from pipeline.paths import ExperimentPaths
from pipeline.system.logging import LOGGER
from pipeline.tracking.mlflow import Mlflow
from pipeline.tracking.publisher import Publisher
from pipeline.tracking.tensorboard import TensorBoard
from pipeline.tracking.wandb import Wandb

_PACKAGES = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb", "PIL"),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
}


def create_trackers(logging: LoggingSettings, own: Mapping[str, BaseTracker]) -> dict[str, BaseTracker]:
    """Return the trackers that settings ask for and the experiment's own, by the folder each has below the logs."""
    trackers: dict[str, BaseTracker] = {}
    if logging.tensorboard:
        trackers["tensorboard"] = TensorBoard()
    if logging.wandb.enabled:
        trackers["wandb"] = Wandb(logging.wandb)
    if logging.mlflow.enabled:
        trackers["mlflow"] = Mlflow(logging.mlflow)
    return {**trackers, **{f"trackers/{name}": tracker for name, tracker in own.items()}}


def check_installed(logging: LoggingSettings, settings_file: Path) -> None:
    """Refuse before training if a tracker was asked for and its packages are not there."""
    problems = []
    for extra in create_trackers(logging, {}):
        if missing := [name for name in _PACKAGES[extra] if find_spec(name) is None]:
            what = f"{extra}.enabled is true, but {', '.join(missing)} is not installed"
            problems.append(Problem(str(settings_file), what, f"pip install 'training-pipeline[{extra}]'"))
    if problems:
        raise InvalidExperiment(problems)


def publish_rest(paths: ExperimentPaths, epoch: int, run_id: str) -> None:
    """Bring the trackers of a finished experiment up to date, whose last run may have been killed before it could."""
    try:
        settings = parse_settings(read_contents(paths.results / "settings"))
        found = PymoduleLoader(paths.results / "pymodules", settings.training.seed).load(["trackers"])["trackers"]
        trackers = create_trackers(settings.logging, {name: module.tracker for name, module in found.items()})
        if trackers:
            records = Records.of_results(settings.loss_registers, paths.data, epoch)
            publisher = Publisher(records, max(1, records.num_steps), paths)
            publisher.begin(trackers, tracked_run(paths, settings, run_id), epoch)
            publisher.resume(epoch)
            publisher.close()
    except Exception as error:
        LOGGER.warning("Trackers may lack the last values: %s", error)


def tracked_run(paths: ExperimentPaths, settings: Settings, run_id: str) -> TrackedRun:
    return TrackedRun(paths.name, run_id, first_step=0, settings=asdict(settings), folder=paths.logs)
