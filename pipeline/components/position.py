"""Where in the training something happens, as components may know it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the training, the same on every rank and after a resume.

    Epochs and steps count from 1. ``step`` is the number of the step in its epoch, and 0 before the first one and in
    evaluations; ``global_step`` is its number in all epochs, or the number of steps taken so far where ``step`` is 0.
    ``turn`` is the place in ``turns`` of ``training.json``, from 0; only module transforms know it.
    """

    epoch: int
    step: int
    global_step: int
    turn: int = 0


def reads_position(component: object) -> bool:
    """Return whether a component has an attribute ``position`` that is not something else of the author's."""
    return hasattr(component, "position") and isinstance(component.position, Position | None)


def show_position(component: object, position: Position | None) -> None:
    """Let a component that reads it know where the training stands."""
    if reads_position(component):
        component.position = position  # type: ignore[attr-defined]
