"""The story of an experiment: everything a page shows, as one value that JSON can hold."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TypedDict

from pipeline.monitoring.curves import Curve, History, Steps
from pipeline.monitoring.experiment_state import ExperimentState, read_run_owner
from pipeline.monitoring.journal import END, read_journal
from pipeline.monitoring.start_outcomes import (
    FAILED,
    FINISHED,
    KILLED,
    RUNNING,
    UNKNOWN,
    StartOutcome,
    describe_starts,
)
from pipeline.paths import ExperimentPaths
from pipeline.progress import TRAINING, Progress
from pipeline.report.lineage import Link, trace_lineage
from pipeline.report.series import (
    MAX_POINTS,
    Series,
    collect_epoch_costs,
    count_steps_per_epoch,
    make_series,
    shorten,
)
from pipeline.system.files import read_regular
from pipeline.system.formatting import flat

_MAX_SERIES = 20
_MIN_POINTS = 100
_SHOWN_OF_EACH = ("world_size", "backend", "host")
_SETTINGS_FILES = ("data_loading", "logging", "loss_registers", "training")


class Place(TypedDict):
    """A place in an experiment, with its words."""

    stage: str
    epoch: int
    step: int
    words: str


class Now(TypedDict):
    """What a live run says of itself."""

    at: Place | None
    eta: float | None
    owner: dict[str, object]


class Best(TypedDict):
    """The best epoch, and the value of each register there."""

    epoch: int
    values: dict[str, float | None]


class SkippedSteps(TypedDict):
    """How many steps were skipped, and where."""

    count: int
    epochs: list[float | None]


class Story(TypedDict):
    """What the page knows of one experiment; page.js and its neighbours read exactly these names."""

    name: str
    state: str
    place: Place | None
    now: Now | None
    errors: list[dict[str, object]]
    best: Best | None
    registers: list[dict[str, object]]
    curves: dict[str, dict[str, Series]]
    skipped: SkippedSteps
    starts: list[dict[str, object]]
    lineage: list[Link]
    settings: dict[str, object]
    copies: dict[str, str]


def collect(experiment: ExperimentState, max_points: int = MAX_POINTS) -> Story:
    """Return the story of one experiment; ``max_points`` limits each of its series."""
    paths = experiment.paths
    journal = read_journal(paths.journal_file)
    # A start that has noted its end is not alive, whatever the lock says: it may be the run that writes this page.
    has_ended = any(event.kind == END and event.start == len(experiment.starts) for event in journal)
    owner = None if has_ended else read_run_owner(paths)
    starts = describe_starts(experiment.starts, journal, is_alive=owner is not None and owner.is_alive)
    progress = experiment.results.progress
    best = experiment.best
    state = starts[-1].outcome if starts else UNKNOWN
    if experiment.results.is_finished:
        state = FINISHED
    now: Now | None = None
    if state == RUNNING:
        status = experiment.status
        content = owner.content if owner else {}
        now = {"at": _describe_place(status.progress), "eta": shorten(status.eta_seconds), "owner": content}
    history = experiment.history()
    steps = history.steps()
    num_steps = count_steps_per_epoch(steps)
    # Of very many skipped steps only some are drawn.
    every = math.ceil(len(steps.skipped) / max_points) or 1
    settings = _read_settings(paths)
    parameters = experiment.parameters()
    return {
        "name": paths.name,
        "state": state,
        "place": _describe_place(progress),
        "now": now,
        "errors": [asdict(error) for error in starts[-1].errors] if state in (FAILED, KILLED) else [],
        "best": {"epoch": best.epoch, "values": best.values} if best else None,
        "registers": _list_registers(settings["loss_registers"]),
        "curves": _collect_curves(history, steps, collect_epoch_costs(journal, num_steps), max_points),
        "skipped": {"count": len(steps.skipped), "epochs": [shorten(epoch) for epoch in steps.skipped[::every]]},
        "starts": [_describe_start(start, num_steps, is_last=start is starts[-1]) for start in starts],
        "lineage": trace_lineage(paths),
        # What people tune comes first.
        "settings": dict(flat({"parameters": parameters} if parameters else {})) | dict(flat(settings)),
        "copies": experiment.manifest.copies if experiment.manifest else {},
    }


def _describe_place(progress: Progress | None) -> Place | None:
    if progress is None:
        return None
    return {"stage": progress.stage, "epoch": progress.epoch, "step": progress.step, "words": str(progress)}


def _collect_curves(
    history: History, steps: Steps, costs: dict[str, dict[str, Curve]], max_points: int
) -> dict[str, dict[str, Series]]:
    """Return every group of curves as series."""
    groups = {
        "train": history.epochs("train"),
        "val": history.epochs("val"),
        "steps": steps.losses,
        "rates": steps.rates,
        "grad_norms": steps.grad_norms,
        "loss_weights": history.loss_weights(),
        **costs,
    }
    # Every experiment gets a page: many series share the points of a few, so that the page stays small.
    num_series = sum(map(len, groups.values()))
    max_points = max(_MIN_POINTS, max_points * _MAX_SERIES // max(_MAX_SERIES, num_series))
    return {
        group: {name: make_series(curve, max_points) for name, curve in curves.items()}
        for group, curves in groups.items()
    }


def _describe_start(start: StartOutcome, num_steps: int, *, is_last: bool) -> dict[str, object]:
    """Return one start with its place on the axis of epochs."""
    progress = start.progress
    epoch = None
    if progress is not None:
        # Epoch 3 is trained between 2 and 3 of the axis, and evaluated at 3.
        whole = progress.epoch - (progress.stage == TRAINING)
        epoch = shorten(whole + (progress.step / num_steps if num_steps else 0))
    # The page shows the surroundings of the last start; of the others a few words are enough.
    recorded = start.recorded if is_last else {name: start.recorded.get(name) for name in _SHOWN_OF_EACH}
    return {
        "number": start.number,
        "from": _describe_place(progress),
        "said": recorded,
        "changed": start.changed,
        **start.end_to_json(),
        "began": start.began,
        "seconds": start.seconds,
        "epoch": epoch,
    }


def _read_settings(paths: ExperimentPaths) -> dict[str, object]:
    """Return the settings of the frozen copy by file; one that cannot be read is empty."""
    settings: dict[str, object] = {}
    for name in _SETTINGS_FILES:
        try:
            settings[name] = json.loads(read_regular(paths.results / "settings" / f"{name}.json"))
        except (OSError, ValueError, RecursionError):
            settings[name] = {}
    return settings


def _list_registers(settings: object) -> list[dict[str, object]]:
    """Return name, direction and whether it is optimised, in the order of the settings."""
    listed = settings.get("loss_registers") if isinstance(settings, dict) else None
    # A register may be given by its name alone.
    entries = [{"name": entry} if isinstance(entry, str) else entry for entry in listed or [] if entry]
    return [{"optimize": True, "direction": "min", **entry} for entry in entries if isinstance(entry, dict)]
