"""Flips one bit on one rank, in every kind of state and with every engine: ``python -m tests.support.flipping``.

All runs happen in the processes of one torchrun. Rank zero writes, as JSON, what each run ended with.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pipeline.arguments import parse_arguments
from pipeline.checkpoint.parts import PersistedParts
from pipeline.distributed.processes import Processes
from pipeline.errors import PipelineError
from pipeline.run import run
from pipeline.session import TrainingSession
from pipeline.training.step import StepObserver
from pipeline.worker import exit_now
from tests.support.experiments import write_experiment

FLIPPED_RANK = 1
ENGINES: dict[str, dict[str, str]] = {
    "fast": {},
    "exact": {"gradient_reduction": "exact"},
    "fsdp": {"parallelism": "fsdp"},
}


def flip(tensor: torch.Tensor) -> None:
    """Change one bit of the last element: not the lowest, which rounding may take back in the next update."""
    tensor.detach().view(-1)[-1:].view(torch.int32)[0] ^= 1 << 16


def flip_weight(session: TrainingSession) -> None:
    flip(session.experiment.components.all_modules["head_a"].weight)  # type: ignore[arg-type]


def flip_frozen_weight(session: TrainingSession) -> None:
    flip(session.experiment.components.all_modules["stem"][0].weight)  # type: ignore[index]


def flip_buffer(session: TrainingSession) -> None:
    flip(session.experiment.components.all_modules["trunk"][1].running_var)  # type: ignore[index]


def flip_optimizer_state(session: TrainingSession) -> None:
    flip(next(iter(session.experiment.optimizers["heads"].state.values()))["momentum_buffer"])


def flip_optimizer_step(session: TrainingSession) -> None:
    flip(next(iter(session.experiment.optimizers["trunk"].state.values()))["step"])


def flip_scaler(session: TrainingSession) -> None:
    session.engine.scaler._growth_tracker += 1  # type: ignore[operator, assignment]


def flip_rate(session: TrainingSession) -> None:
    session.experiment.optimizers["heads"].param_groups[0]["lr"] *= 1 + 2**-52


def flip_flag(session: TrainingSession) -> None:
    session.experiment.components.all_modules["head_b"].requires_grad_(False)


def flip_flags_everywhere(session: TrainingSession) -> None:
    """All ranks change flags, but not the same."""
    name = "head_b" if session.processes.rank == FLIPPED_RANK else "head_a"
    session.experiment.components.all_modules[name].requires_grad_(False)


def flip_scheduler(session: TrainingSession) -> None:
    """The warm-up is over by then, so that the rates do not show it: only what is saved does."""
    scheduler: Any = session.experiment.schedulers["trunk"]
    scheduler.full_rates[0] *= 1 + 2**-52


def flip_weighter(session: TrainingSession) -> None:
    weighter: Any = session.experiment.components.loss_weighter
    weighter.averages["loss_a"] *= 1 + 2**-50


WHOLE: dict[str, Callable[[TrainingSession], None]] = {
    "weight": flip_weight,
    "buffer": flip_buffer,
    "optimizer state": flip_optimizer_state,
    "scaler": flip_scaler,
    "rate": flip_rate,
    "flag": flip_flag,
    "other flags": flip_flags_everywhere,
    "scheduler": flip_scheduler,
    "weighter": flip_weighter,
}
REPLICATED: dict[str, Callable[[TrainingSession], None]] = {
    "frozen weight": flip_frozen_weight,
    "buffer": flip_buffer,
    "optimizer step": flip_optimizer_step,
    "scaler": flip_scaler,
    "rate": flip_rate,
    "scheduler": flip_scheduler,
    "weighter": flip_weighter,
}


class Flipper(StepObserver):
    """Flips in the second epoch: in the first, gradients are too large for fp16, and no step is taken."""

    def __init__(self, session: TrainingSession, flip_state: Callable[[TrainingSession], None]) -> None:
        self._machinery, self._flip = session, flip_state

    def step_begins(self, epoch: int, step: int) -> None:
        is_flipped = self._machinery.processes.rank == FLIPPED_RANK or self._flip is flip_flags_everywhere
        if (epoch, step) == (2, 2) and is_flipped:
            self._flip(self._machinery)


@contextmanager
def flipped_restore(rank: int) -> Iterator[None]:
    """Let one rank find another weight than was committed."""
    restore = PersistedParts.restore

    def restore_and_flip(parts: PersistedParts, *arguments: Any) -> None:
        restore(parts, *arguments)
        if rank == FLIPPED_RANK:
            flip(parts._components.all_modules["stem"][0].weight)  # type: ignore[index]

    PersistedParts.restore = restore_and_flip  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        PersistedParts.restore = restore  # type: ignore[method-assign]


def main(top: Path) -> None:
    processes = Processes.join()
    found: dict[str, str] = {}
    for engine, training in ENGINES.items():
        for kind, flip_state in (REPLICATED if engine == "fsdp" else WHOLE).items():
            home = top / f"{engine}_{kind}"
            if processes.is_rank_zero:
                write_experiment(home, training={**training, "precision": "fp16"})
            processes.barrier()

            def watch(session: TrainingSession, flip_state: Callable[[TrainingSession], None] = flip_state) -> None:
                session.training.observer = Flipper(session, flip_state)

            found[f"{engine}, {kind}"] = outcome(home, processes, watch)
        with flipped_restore(processes.rank):
            found[f"{engine}, restore"] = outcome(home, processes, None, "--resume")
    if processes.is_rank_zero:
        (top / "found.json").write_text(json.dumps(found))
    processes.barrier()


def outcome(home: Path, processes: Processes, watch: Callable[[TrainingSession], None] | None, *words: str) -> str:
    try:
        run(parse_arguments(["tiny", "--data-home", str(home), *words]), processes, watch=watch)
    except PipelineError as error:
        return f"{type(error).__name__}: {error}"
    return "finished"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    exit_now(0)
