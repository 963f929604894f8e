"""From the row of an engine to the engine itself."""

from __future__ import annotations

import pkgutil

from pipeline.distributed.processes import Processes
from pipeline.experiment.assembly import Experiment
from pipeline.experiment.settings.engines import ENGINES
from pipeline.training.engines.base import GradientEngine


def create_engine(experiment: Experiment, processes: Processes) -> GradientEngine:
    """Return the engine that the settings ask for."""
    training = experiment.settings.training
    # One process has no shards, so its parallelism does not matter.
    name = training.parallelism if experiment.is_sharded else training.gradient_reduction
    engine: GradientEngine = pkgutil.resolve_name(ENGINES[name].implementation)(experiment, processes)
    return engine
