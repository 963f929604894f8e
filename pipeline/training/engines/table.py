"""The table of engines: by the name that ``training.json`` has for each."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.distributed.processes import Processes
from pipeline.experiment.assembly import Experiment
from pipeline.experiment.settings.settings import FSDP
from pipeline.training.engines.base import GradientEngine
from pipeline.training.engines.ddp import DdpEngine
from pipeline.training.engines.exact import ExactEngine
from pipeline.training.engines.fsdp import FsdpEngine

# A new engine is a file next to this one, a row here, and its name in the schema of training.json. If its bits do not
# depend on the number of processes, TrainingSettings.is_exact names it too.
ENGINES: dict[str, Callable[[Experiment, Processes], GradientEngine]] = {
    "fast": DdpEngine,
    "exact": ExactEngine,
    FSDP: FsdpEngine,
}


def create_engine(experiment: Experiment, processes: Processes) -> GradientEngine:
    """Return the engine that the settings ask for."""
    # One process has no shards, so its parallelism does not matter.
    name = FSDP if experiment.is_sharded else experiment.settings.training.gradient_reduction
    return ENGINES[name](experiment, processes)
