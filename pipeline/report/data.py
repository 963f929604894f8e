"""The story of an experiment: everything a page shows, as one value that JSON can hold."""

from __future__ import annotations

import json
import math
from typing import Any

from pipeline.lifecycle.mode import inspect_results
from pipeline.monitoring.curves import Curve, History, Steps
from pipeline.monitoring.journal import EPOCH, read_journal
from pipeline.monitoring.start_outcomes import FAILED, FINISHED, KILLED, RUNNING, UNKNOWN, outcomes, place
from pipeline.monitoring.status_file import read_status
from pipeline.paths import ExperimentPaths
from pipeline.report.lineage import lineage
from pipeline.report.series import MAX_POINTS, series, shortened
from pipeline.store.lock import read_owner
from pipeline.store.store import read_current_manifest
from pipeline.system.files import read_regular
from pipeline.system.formatting import flat

_MAX_SERIES = 20
_FEWEST_POINTS = 100
_SHOWN_OF_EACH = ("world_size", "backend", "host")
_SETTINGS_FILES = ("data_loading", "logging", "loss_registers", "training")


def collect(paths: ExperimentPaths, max_points: int = MAX_POINTS) -> dict[str, Any]:
    """Return the story of one experiment; ``max_points`` limits each of its series."""
    manifest = read_current_manifest(paths)
    starts = outcomes(paths)
    settings = _settings(paths)
    steps = History(paths).steps()
    run_state = manifest.run_state if manifest else {}
    return {
        "name": paths.name,
        **_state(paths, starts),
        "best": run_state.get("best") or None,
        "registers": _registers(settings),
        "curves": _curves(paths, steps, max_points),
        "skipped": _skipped(steps, max_points),
        "starts": _placed(starts, _num_steps(steps)),
        "lineage": lineage(paths),
        "settings": dict(flat(settings)),
        "copies": manifest.copies if manifest else {},
    }


def _state(paths: ExperimentPaths, starts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return whether a run is alive or how the last one ended, and where the experiment stands."""
    progress = inspect_results(paths).progress
    outcome = starts[-1]["outcome"] if starts else UNKNOWN
    state = FINISHED if progress and progress.is_finished else outcome
    return {
        "state": state,
        "place": place(progress.as_json()) if progress else None,
        "now": _now(paths) if state == RUNNING else None,
        "errors": starts[-1]["errors"] if state in (FAILED, KILLED) and starts else [],
    }


def _now(paths: ExperimentPaths) -> dict[str, Any]:
    """Return what a live run says of itself."""
    status = read_status(paths.status_file)
    return {"at": place(status.get("progress")), "eta": shortened(status.get("eta")), "owner": read_owner(paths)}


def _curves(paths: ExperimentPaths, steps: Steps, max_points: int) -> dict[str, Any]:
    history = History(paths)
    groups = {
        "train": history.epochs("train"),
        "val": history.epochs("val"),
        "steps": steps.losses,
        "rates": steps.rates,
        "grad_norms": steps.grad_norms,
        "loss_weights": history.loss_weights(),
        **_paces(paths, _num_steps(steps)),
    }
    max_points = max(_FEWEST_POINTS, max_points * _MAX_SERIES // max(_MAX_SERIES, sum(map(len, groups.values()))))
    return {
        kind: {name: series(curve, max_points) for name, curve in curves.items()} for kind, curves in groups.items()
    }


def _paces(paths: ExperimentPaths, num_steps: int) -> dict[str, dict[str, Curve]]:
    """Return how long epochs took and how much memory they needed, as far as it was noted."""
    noted: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for event in read_journal(paths.journal_file):
        if event["kind"] == EPOCH and type(event.get("epoch")) is int and event.get("split") in ("train", "val"):
            noted.setdefault((event["split"], event["epoch"]), []).append(event)
    times = {"training": Curve(), "loading data": Curve(), "validation": Curve()}
    memory: dict[str, Curve] = {"memory": Curve()}
    for (split, epoch), events in sorted(noted.items(), key=lambda item: item[0][1]):
        if split == "train":
            _add(times["training"], epoch, _whole(events, "seconds", num_steps))
            _add(times["loading data"], epoch, _whole(events, "data_seconds", num_steps))
            _add(memory["memory"], epoch, shortened(events[-1].get("memory")))
        else:
            _add(times["validation"], epoch, shortened(events[-1].get("seconds")))
    return {"times": times, "memory": memory}


def _add(curve: Curve, epoch: int, value: float | None) -> None:
    curve.epochs.append(epoch)
    curve.values.append(math.nan if value is None else value)


def _whole(events: list[dict[str, Any]], name: str, num_steps: int) -> float | None:
    """Return the seconds of a whole epoch; of one that was interrupted, those of the parts that were noted, scaled."""
    parts = [(shortened(event.get(name)), _num_noted(event.get("steps"))) for event in events]
    known = [(seconds, count) for seconds, count in parts if seconds is not None and count > 0]
    noted = sum(count for _, count in known)
    return sum(seconds for seconds, _ in known) * (num_steps or noted) / noted if noted else None


def _num_noted(steps: Any) -> int:
    is_range = isinstance(steps, list) and len(steps) == 2 and all(type(step) is int for step in steps)
    return max(0, steps[1] - steps[0] + 1) if is_range else 0


def _num_steps(steps: Steps) -> int:
    """Return the number of steps of an epoch, which places its first step."""
    first = next((curve.epochs[0] for curve in steps.rates.values() if curve.epochs), None)
    return round(1 / first) if first and first <= 1 else 0


def _skipped(steps: Steps, max_points: int) -> dict[str, Any]:
    every = math.ceil(len(steps.skipped) / max_points) or 1
    return {"count": len(steps.skipped), "epochs": [shortened(epoch) for epoch in steps.skipped[::every]]}


def _placed(starts: list[dict[str, Any]], num_steps: int) -> list[dict[str, Any]]:
    """Return the starts with their places on the axis of epochs; all that one said is shown of the last alone."""
    shown = [{name: start["said"].get(name) for name in _SHOWN_OF_EACH} for start in starts[:-1]]
    said = [*shown, *(start["said"] for start in starts[-1:])]
    return [
        {**start, "said": own, "epoch": _epoch(start["from"], num_steps)}
        for start, own in zip(starts, said, strict=True)
    ]


def _epoch(at: dict[str, Any] | None, num_steps: int) -> float | None:
    if at is None:
        return None
    is_training = at["stage"] == "training"
    return shortened(at["epoch"] - is_training + (at["step"] / num_steps if num_steps else 0))


def _settings(paths: ExperimentPaths) -> dict[str, Any]:
    return {name: _read(paths, name) for name in _SETTINGS_FILES}


def _read(paths: ExperimentPaths, name: str) -> Any:
    try:
        return json.loads(read_regular(paths.results / "settings" / f"{name}.json"))
    except (OSError, ValueError, RecursionError):
        return {}


def _registers(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return name, direction and whether it is optimised, in the order of the settings."""
    file = settings["loss_registers"]
    listed = file.get("loss_registers") if isinstance(file, dict) else None
    entries = [{"name": entry} if isinstance(entry, str) else entry for entry in listed or [] if entry]
    return [{"optimize": True, "direction": "min", **entry} for entry in entries if isinstance(entry, dict)]
