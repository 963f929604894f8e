"""Stories as the report tells them, without a run: what a page must be able to show."""

from __future__ import annotations

from typing import Any

HOSTILE = "</script><img src=x onerror=\"document.title='broken'\">"


def series(values: list[float | None], first: float = 0) -> dict[str, list[Any]]:
    return {"x": [first + place for place in range(len(values))], "y": values}


def story(name: str = "tiny", **changes: Any) -> dict[str, Any]:
    """Return a finished experiment of three epochs with one register; ``changes`` replace parts of it."""
    curves = {"train": {"loss": series([3.0, 2.0, 1.0], 1)}, "val": {"loss": series([4.0, 3.0, 1.5, 2.0])}}
    groups = ("steps", "rates", "grad_norms", "loss_weights", "times", "memory")
    others: dict[str, Any] = {group: {} for group in groups}
    plain: dict[str, Any] = {
        "name": name,
        "state": "finished",
        "place": {"stage": "finished", "epoch": 3, "step": 0, "words": "finished"},
        "now": None,
        "errors": [],
        "best": {"epoch": 2, "values": {"loss": 1.5}},
        "registers": [{"name": "loss", "optimize": True, "direction": "min"}],
        "curves": {**curves, **others, **changes.pop("curves", {})},
        "skipped": {"count": 0, "epochs": []},
        "starts": [start(1, "finished")],
        "lineage": [],
        "settings": {"training.seed": 3},
        "copies": {"pymodules/datasets/a.py": "0" * 64},
    }
    return {**plain, **changes}


def start(number: int, outcome: str, **changes: Any) -> dict[str, Any]:
    """Return one start of an experiment."""
    plain: dict[str, Any] = {
        "number": number,
        "from": None,
        "epoch": 0.0,
        "said": {"host": "here", "world_size": 2, "torch": "2.13.0", "devices": ["cpu", "cpu"]},
        "changed": [],
        "outcome": outcome,
        "reason": None,
        "errors": [],
        "began": "2026-01-01 00:00:00+0000",
        "seconds": 60.0,
    }
    return {**plain, **changes}
