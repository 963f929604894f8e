"""Trackers: services in which people watch a run. They mirror the results, which are the truth."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


class Point(NamedTuple):
    """One value of one curve."""

    tag: str
    step: int
    value: float


class Image(NamedTuple):
    """One image, as the bytes of a PNG file."""

    tag: str
    step: int
    png: bytes


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker knows about its run; ``run_id`` is the same at every start of an experiment."""

    experiment: str
    run_id: str
    first_step: int
    settings: dict[str, Any]
    folder: Path


class BaseTracker:
    """Shows committed values somewhere. It runs on rank 0; if it raises, the run warns and continues without it.

    Points come in the order of their steps, each once per start. Every start sends the points from ``run.first_step``
    on again, because the last ones before a kill may not have been published: a tracker drops what it has from that
    step on, or skips what it already has.
    """

    def begin(self, run: TrackedRun) -> int | None:
        """Prepare; return an earlier step if points from there on were lost and must be sent again, else None."""
        return None

    def publish(self, points: list[Point]) -> None:
        """Show points. All of them are committed."""

    def publish_images(self, images: list[Image]) -> None:
        """Show images. All of them belong to committed evaluations."""

    def close(self) -> None:
        """Finish. Called when a run ends regularly, not when it fails or is killed."""
