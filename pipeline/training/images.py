"""Pictures that module transforms make of a batch, for people to look at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pipeline.experiment.assembly import Experiment
from pipeline.experiment.pymodules.user_code import user_problem
from pipeline.serialization.png import png_of
from pipeline.system.logging import LOGGER
from pipeline.training.batch_runner import BatchRunner
from pipeline.training.buffers import preserved_buffers
from pipeline.training.step_plan import BatchRef, EpochPoints


class Pictures:
    """Asks each module transform that has ``images`` for pictures of its first validation batch.

    They are not part of the results: nothing they need is drawn from or left in what training uses, and one that fails
    is not asked again.
    """

    def __init__(self, experiment: Experiment, runner: BatchRunner, transforms: Mapping[str, Any]) -> None:
        self._experiment = experiment
        self._runner = runner
        self._transforms = transforms
        self._failed: set[str] = set()

    def take(self, epoch: int) -> dict[str, bytes]:
        """Return PNG files by dataset and name; the modules must be in evaluation mode."""
        shapes = {shape.dataset: shape for shape in self._runner.shapes if shape.num_batches}
        wanted = [name for name in shapes if hasattr(self._transforms[name], "images") and name not in self._failed]
        points = self._runner.points(epoch)
        found = dict[str, bytes]()
        for name in wanted:
            try:
                found |= self._taken(BatchRef(shapes[name], 0), points)
            except (Exception, SystemExit) as error:
                self._failed.add(name)
                self._warn(name, error)
        return found

    def _taken(self, ref: BatchRef, points: EpochPoints) -> dict[str, bytes]:
        dataset = ref.shape.dataset
        (batch,) = self._runner.load([ref], points)
        with torch.no_grad(), preserved_buffers(self._experiment.components.all_modules.values()):
            images = self._runner.images(batch, ref, (*points.batch(ref).key, "images"))
            return {f"{dataset}/{name}": png_of(image) for name, image in images.items()}

    def _warn(self, dataset: str, error: BaseException) -> None:
        where = f"module_transforms/{dataset}.py"
        problem = user_problem(error, self._experiment.folder, where, "images must return a dict of pictures")
        LOGGER.warning("%s. Training continues without images of %s.", problem, dataset)
