"""Progress of an experiment as an immutable value."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

PREPARE = "prepare"
EVALUATION = "evaluation"
TRAINING = "training"
FINISHED = "finished"
# In the order in which they follow each other within an epoch; results hold the names.
_STAGES = (PREPARE, TRAINING, EVALUATION, FINISHED)


@dataclass(frozen=True)
class Progress:
    """The stage to run next and, inside a training stage, the number of steps already taken."""

    stage: str = PREPARE
    epoch: int = 0
    step: int = 0

    @property
    def is_finished(self) -> bool:
        return self.stage == FINISHED

    @property
    def is_fresh(self) -> bool:
        """Whether nothing has been done yet, not even the preparation."""
        return self.stage == PREPARE

    @property
    def has_trained(self) -> bool:
        """Whether a training step lies before this place."""
        return self.order > (1, _STAGES.index(TRAINING), 0)

    @property
    def order(self) -> tuple[int, int, int]:
        """Return a key that sorts places in the order in which they are reached."""
        return (self.epoch, _STAGES.index(self.stage), self.step)

    def next(self, *, evaluate: bool = True, stop: bool = False) -> Progress:
        """Return the place that follows once this stage is complete.

        prepare → evaluation 0 → training 1 → evaluation 1 → training 2 → … → finished
        """
        if stop:
            return Progress(FINISHED, self.epoch)
        if self.stage == PREPARE or (self.stage == TRAINING and evaluate):
            return Progress(EVALUATION, self.epoch)
        return Progress(TRAINING, self.epoch + 1)

    def at_step(self, step: int) -> Progress:
        return Progress(self.stage, self.epoch, step)

    def describe_next(self) -> str:
        """Return in words what is computed next."""
        # Steps are counted from 1 where people read them, and ``step`` of them are taken.
        if self.stage == TRAINING:
            return f"epoch {self.epoch}, step {self.step + 1}"
        return "the first step" if self.stage == PREPARE else str(self)

    def as_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Progress:
        """Return the progress that ``as_json`` described; raise ValueError, TypeError or KeyError if it is not one."""
        progress = cls(value["stage"], value["epoch"], value["step"])
        counts = (progress.epoch, progress.step)
        # ``type``, not isinstance: JSON's true is an int to Python.
        if progress.stage not in _STAGES or any(type(count) is not int or count < 0 for count in counts):
            raise ValueError(f"{value} is not a place in an experiment")
        return progress

    def __str__(self) -> str:
        if self.stage in (PREPARE, FINISHED):
            return self.stage
        return f"epoch {self.epoch}, {self.stage}" + (f", step {self.step}" if self.stage == TRAINING else "")
