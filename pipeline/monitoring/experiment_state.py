"""The state of an experiment, read from its files without changing them and without torch.

Each verb reads it once and passes it on: ``read_experiment_state`` for verbs that show an experiment,
``read_liveness`` for those that only ask whether a run is alive or on its way.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
from dataclasses import dataclass

from pipeline.errors import UnreadableFile
from pipeline.lifecycle.mode import Situation, inspect_results, unknown_experiment
from pipeline.lifecycle.starts import Start, read_starts
from pipeline.monitoring.curves import History
from pipeline.monitoring.journal import read_journal
from pipeline.monitoring.json_values import BestEpoch
from pipeline.monitoring.launch_record import Launch, read_launch
from pipeline.monitoring.start_outcomes import UNKNOWN, StartOutcome, describe_starts
from pipeline.monitoring.status_file import Status, read_status
from pipeline.paths import ExperimentPaths, results_names
from pipeline.store.lock import HEARTBEAT_SECONDS, MAX_MISSED_HEARTBEATS, is_held, read_owner, seconds_since_beat
from pipeline.store.manifest import Manifest
from pipeline.store.store import read_current_manifest
from pipeline.system.files import num_bytes, read_regular
from pipeline.system.formatting import as_json
from pipeline.system.slurm_client import PENDING

FINISHED = "finished"
RUNNING = "running"
STARTING = "starting"
WAITING = "waiting"
UNFINISHED = "unfinished"
NEW = "new"
LIVE = (RUNNING, STARTING, WAITING)


@dataclass(frozen=True)
class ExperimentState:
    """What the small files of an experiment say, each read once; empty before the first results."""

    paths: ExperimentPaths
    results: Situation
    starts: list[Start]
    manifest: Manifest | None
    status: Status

    @property
    def best(self) -> BestEpoch | None:
        """The best epoch up to the current commit."""
        return BestEpoch.from_json(self.manifest.run_state.get("best")) if self.manifest else None

    def parameters(self) -> dict[str, object]:
        """Return the parameters of the frozen copy; empty if it has none, or they cannot be read."""
        try:
            parameters = json.loads(read_regular(self.paths.results / "settings" / "parameters.json"))
        except (OSError, ValueError, RecursionError):
            return {}
        return parameters if isinstance(parameters, dict) else {}

    def direction(self, register: str) -> str:
        """Return which way a register is better, as the frozen copy says."""
        try:
            entries = json.loads(read_regular(self.paths.results / "settings" / "loss_registers.json"))[
                "loss_registers"
            ]
        except (OSError, ValueError, RecursionError, KeyError, TypeError):
            return "min"
        directions = {entry.get("name"): entry.get("direction") for entry in entries if isinstance(entry, dict)}
        return directions.get(register) or "min"

    def history(self) -> History:
        """Return the recorded curves of the same commit."""
        return History(self.paths, self.manifest, num_steps=self.status.num_steps or 0)


def read_experiment_state(paths: ExperimentPaths) -> ExperimentState:
    """Read one experiment; if a live run commits at the same time, the parts may differ by a commit."""
    results = inspect_results(paths)
    starts = read_starts(paths)
    # A start is recorded before its first commit; manifest and status come with the commit.
    if not results.exists:
        return ExperimentState(paths, results, starts, None, Status())
    manifest = read_current_manifest(paths, results.generation)
    return ExperimentState(paths, results, starts, manifest, read_status(paths.status_file))


def read_existing_state(paths: ExperimentPaths) -> ExperimentState:
    """Read one experiment, or refuse one that never committed anything, naming those that did."""
    experiment = read_experiment_state(paths)
    if not experiment.results.exists:
        raise unknown_experiment(paths, results_names(paths.home), "results of")
    return experiment


@dataclass(frozen=True)
class RunOwner:
    """The run that holds an experiment, or the last one that did, as the lock file names it."""

    is_alive: bool
    seconds_since_heartbeat: float | None
    content: dict[str, object]


def read_run_owner(paths: ExperimentPaths) -> RunOwner:
    """Return who holds the experiment, and whether that run is alive: by the lock, else by a recent heartbeat."""
    content: dict[str, object] = read_owner(paths)
    age = seconds_since_beat(paths)
    # The lock of another machine may not be seen here. Its heartbeat is, and comparing it with this machine's clock is
    # good enough for what is only shown.
    is_elsewhere = content.get("host") != socket.gethostname()
    is_beating = is_elsewhere and age is not None and age < MAX_MISSED_HEARTBEATS * HEARTBEAT_SECONDS
    return RunOwner(is_held(paths) or is_beating, age, content)


@dataclass(frozen=True)
class Liveness:
    """One of the states above; with the owner of a run, or the launch of one that is starting or waiting."""

    state: str
    owner: RunOwner | None = None
    launch: Launch | None = None


def state_of(paths: ExperimentPaths) -> str:
    """Return one of finished, running, starting, waiting, unfinished, new."""
    return read_liveness(paths).state


def read_liveness(paths: ExperimentPaths, experiment: ExperimentState | None = None) -> Liveness:
    """Determine the state from as few files as possible; what ``experiment`` holds is not read again."""
    results = experiment.results if experiment else inspect_results(paths)
    if results.is_finished:
        return Liveness(FINISHED)
    owner = read_run_owner(paths)
    if owner.is_alive:
        return Liveness(RUNNING, owner=owner)
    launch = read_launch(paths)
    if launch is not None and launch.job is not None:
        # Slurm knows whether the job waits; a job that has begun takes a while until its run holds the lock.
        return Liveness(WAITING if launch.job_state == PENDING else STARTING, launch=launch)
    if launch is not None:
        starts = experiment.starts if experiment else read_starts(paths)
        # A launched process outlives its run: torchrun takes a while to leave, and a chain has other experiments.
        if not launch.has_opened(starts[-1] if starts else None):
            is_next = not launch.after or inspect_results(paths.other(launch.after)).is_finished
            return Liveness(STARTING if is_next else WAITING, launch=launch)
    return Liveness(UNFINISHED if results.exists else NEW)


def find_end(experiment: ExperimentState, liveness: Liveness) -> StartOutcome | None:
    """Return how the last start of an unfinished experiment ended."""
    if liveness.state != UNFINISHED:
        return None
    outcomes = describe_starts(experiment.starts, read_journal(experiment.paths.journal_file), is_alive=False)
    return outcomes[-1] if outcomes else None


def describe_state(experiment: ExperimentState) -> str:
    """Return the state in a word, of an unfinished experiment how its last start ended."""
    liveness = read_liveness(experiment.paths, experiment)
    return name_state(liveness.state, find_end(experiment, liveness))


def name_state(state: str, ended: StartOutcome | None) -> str:
    """Return the word for a state: failed, killed or stopped say more than unfinished."""
    return state if ended is None or ended.outcome == UNKNOWN else ended.outcome


@dataclass(frozen=True)
class Overview:
    """Everything that ``status`` shows of one experiment.

    ``launch`` is also there for a run that was submitted as a job; ``ended`` is how the last start of an unfinished
    experiment ended; ``validation`` has the means of every register over the epochs, None for NaN.
    """

    experiment: ExperimentState
    state: str
    owner: RunOwner | None
    launch: Launch | None
    ended: StartOutcome | None
    validation: dict[str, list[float | None]]
    used_bytes: int
    free_bytes: int

    def to_json(self) -> dict[str, object]:
        """Return it as ``status --json`` prints it, with everything that the status file has."""
        results = self.experiment.results
        launch = self.launch.content if self.launch else {}
        return {
            **self.experiment.status.content,
            "state": self.state,
            "committed": results.progress.as_json() if results.progress else None,
            "owner": self.owner.content if self.owner else None,
            "launch": launch if self.state in LIVE else None,
            "seconds_since_sign_of_life": self.owner.seconds_since_heartbeat if self.owner else None,
            "num_starts": len(self.experiment.starts) if results.exists else 0,
            "ended": self.ended.end_to_json() if self.ended else None,
            "parameters": self.experiment.parameters(),
            "history": self.validation,
            "disk": {"used": self.used_bytes, "free": self.free_bytes},
        }


def read_overview(paths: ExperimentPaths) -> Overview:
    """Read everything that ``status`` shows."""
    experiment = read_experiment_state(paths)
    liveness = read_liveness(paths, experiment)
    validation = {}
    if experiment.results.exists:
        # Damaged records are a matter for fsck; the rest of the state is worth showing.
        with contextlib.suppress(OSError, UnreadableFile):
            curves = experiment.history().epochs("val")
            validation = {register: as_json(curve.values) for register, curve in curves.items()}
    existing = paths.results
    while not existing.exists():
        existing = existing.parent
    return Overview(
        experiment,
        liveness.state,
        liveness.owner,
        # The state of a live run does not depend on its launch, but its page names the job.
        read_launch(paths) if liveness.state == RUNNING else liveness.launch,
        find_end(experiment, liveness),
        validation,
        used_bytes=num_bytes(paths.results),
        free_bytes=shutil.disk_usage(existing).free,
    )
