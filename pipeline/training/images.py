"""Pictures that module transforms make of a batch, for people to look at."""

from __future__ import annotations

import torch

from pipeline.experiment.assembly import Experiment
from pipeline.experiment.pymodules.user_code import user_problem
from pipeline.serialization.png import png_of
from pipeline.system.logging import LOGGER
from pipeline.training.batch_runner import BatchRunner
from pipeline.training.buffers import preserved_buffers
from pipeline.training.step_plan import BatchRef


class Pictures:
    """Asks each module transform that has ``images`` for pictures of its first validation batch.

    They are not part of the results: nothing they need is drawn from or left in what training uses, and one that fails
    is not asked again.
    """

    def __init__(self, experiment: Experiment, runner: BatchRunner) -> None:
        self._experiment = experiment
        self._runner = runner
        self._failed: set[str] = set()

    def take(self, epoch: int) -> dict[str, bytes]:
        """Return PNG files by dataset and name; the modules must be in evaluation mode."""
        shapes = {shape.dataset: shape for shape in self._runner.shapes if shape.num_batches}
        transforms = self._experiment.module_transforms
        wanted = [name for name in shapes if hasattr(transforms[name], "images") and name not in self._failed]
        points = self._runner.points(epoch)
        pictures = dict[str, bytes]()
        for dataset in wanted:
            ref = BatchRef(shapes[dataset], 0)
            try:
                (loaded,) = self._runner.load([ref], points)
                with torch.no_grad(), preserved_buffers(self._experiment.components.all_modules.values()):
                    images = self._runner.images(loaded.batch, ref, (*points.batch(ref).key, "images"))
                    pictures |= {f"{dataset}/{name}": png_of(image) for name, image in images.items()}
            except (Exception, SystemExit) as error:
                # Pictures are for people only: a mistake in them must not end a training.
                self._failed.add(dataset)
                where = f"module_transforms/{dataset}.py"
                problem = user_problem(error, self._experiment.folder, where, "images must return a dict of pictures")
                LOGGER.warning("%s. Training continues without images of %s.", problem, dataset)
        return pictures
