"""Trackers: mirrors in which people watch a run."""

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
    """One picture, as the bytes of a PNG file."""

    tag: str
    step: int
    png: bytes


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker knows about the run it shows; the same ``run_id`` at every start of an experiment."""

    experiment: str
    run_id: str
    first_step: int
    settings: dict[str, Any]
    folder: Path


class BaseTracker:
    """Shows committed values somewhere; lives on rank zero, and is left behind with a warning if it raises.

    Every point is handed over in the order of its steps, once in the life of a process. Those from
    ``run.first_step`` on are handed over again by each start: a tracker forgets what it has from there on, or
    skips what it has already.
    """

    def begin(self, run: TrackedRun) -> int | None:
        """Get ready; may return an earlier step, if points from there on have been lost and are wanted again."""
        return None

    def publish(self, points: list[Point]) -> None:
        """Show points, all of which are committed."""

    def publish_images(self, images: list[Image]) -> None:
        """Show images, all of which belong to committed evaluations."""

    def close(self) -> None:
        """Finish; called when a run ends by itself, not when it fails or is killed."""
