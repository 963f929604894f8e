"""The trackers that settings can enable: one row each, with what it needs and how its curves are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from pipeline.checkpoint.records import Records
from pipeline.components import BaseTracker, TrackedRun
from pipeline.errors import InvalidExperiment, Problem
from pipeline.experiment.pymodules.loader import PymoduleLoader
from pipeline.experiment.settings.parameters import PARAMETERS
from pipeline.experiment.settings.settings import LoggingSettings, Settings, parse_settings, read_contents
from pipeline.lifecycle.starts import run_id
from pipeline.paths import ExperimentPaths
from pipeline.system.logging import LOGGER
from pipeline.tracking.mlflow import DATABASE, Mlflow
from pipeline.tracking.publisher import Publisher
from pipeline.tracking.tensorboard import TensorBoard
from pipeline.tracking.wandb import Wandb


@dataclass(frozen=True)
class _Registration:
    """How a tracker is created, which packages it imports, and how a person looks at what it has written."""

    from_settings: Callable[[LoggingSettings], BaseTracker | None]
    packages: tuple[str, ...]
    # A command in which {} stands for the tracker's folder below the logs.
    show_command: str
    # Files of that folder without which there is nothing to show; empty if the folder itself is enough.
    shown_files: str = ""


# By name. It is the tracker's key in logging.json, its folder below the logs, and the extra that installs its packages.
_TRACKERS = {
    "tensorboard": _Registration(TensorBoard.from_settings, ("tensorboard",), "tensorboard --logdir {}"),
    "wandb": _Registration(Wandb.from_settings, ("wandb", "PIL"), "wandb sync {}/offline-run-*", "offline-run-*"),
    "mlflow": _Registration(
        Mlflow.from_settings,
        ("mlflow", "sqlalchemy", "alembic"),
        f"mlflow ui --backend-store-uri sqlite:///{{}}/{DATABASE}",
        DATABASE,
    ),
}


def create_trackers(logging: LoggingSettings, authored: Mapping[str, BaseTracker]) -> dict[str, BaseTracker]:
    """Return the trackers that settings enable and those of the author, by the folder each has below the logs."""
    created = {name: registration.from_settings(logging) for name, registration in _TRACKERS.items()}
    trackers = {name: tracker for name, tracker in created.items() if tracker is not None}
    # In a folder of their own, so that an author may call a tracker "wandb" as well.
    return {**trackers, **{f"trackers/{name}": tracker for name, tracker in authored.items()}}


def check_installed(logging: LoggingSettings, settings_file: Path) -> None:
    """Refuse before training if a tracker is enabled and its packages are not installed."""
    problems = []
    for extra in create_trackers(logging, {}):
        # Not imported yet: a tracker first sets environment variables that its package reads when it is imported.
        if missing := [name for name in _TRACKERS[extra].packages if find_spec(name) is None]:
            what = f"{extra}.enabled is true, but {', '.join(missing)} is not installed"
            problems.append(Problem(str(settings_file), what, f"pip install 'training-pipeline[{extra}]'"))
    if problems:
        raise InvalidExperiment(problems)


def show_commands(logs: Path) -> Iterator[str]:
    """Yield, for each tracker that has written something below the logs, the command that shows it."""
    for name, registration in _TRACKERS.items():
        if any(logs.glob(f"{name}/{registration.shown_files}")):
            yield registration.show_command.format(logs / name)


def publish_rest(paths: ExperimentPaths, epoch: int) -> None:
    """Bring the trackers of a finished experiment up to date, whose last run may have been killed before it could."""
    try:
        settings = parse_settings(read_contents(paths.results / "settings"))
        # Of the pymodules, trackers alone: no dataset is needed to send what is recorded.
        loader = PymoduleLoader(paths.results / "pymodules", settings.training.seed, settings.parameters)
        pymodules = loader.load(["trackers"])["trackers"]
        trackers = create_trackers(settings.logging, {name: module.tracker for name, module in pymodules.items()})
        if trackers:
            records = Records.of_results(settings.loss_registers, paths.data, epoch)
            # The last epoch may be shorter than the others.
            num_steps = records.of_epoch(paths.data, 1).num_steps if epoch > 1 else records.num_steps
            last_step = (epoch - 1) * num_steps + records.num_steps if epoch else None
            publisher = Publisher(records, max(1, num_steps), paths, last_step)
            publisher.begin(trackers, tracked_run(paths, settings), epoch)
            publisher.resume(epoch)
            publisher.close()
    except Exception as error:
        # The experiment is finished whatever an author's tracker or a server does.
        LOGGER.warning("Trackers may lack the last values: %s", error)


def tracked_run(paths: ExperimentPaths, settings: Settings) -> TrackedRun:
    """Return what trackers learn about a run; the publisher adds each tracker's first step and folder."""
    others = asdict(settings)
    # What people tune comes first.
    shown = {PARAMETERS: parameters} if (parameters := others.pop(PARAMETERS)) else {}
    return TrackedRun(paths.name, run_id(paths), first_step=0, settings={**shown, **others}, folder=paths.logs)
