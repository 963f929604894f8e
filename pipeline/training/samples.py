"""Samples for people to look at: images and files that module transforms make of a validation batch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from pipeline.distributed.processes import Processes
from pipeline.experiment.assembly import Experiment
from pipeline.experiment.pymodules.user_code import user_problem
from pipeline.serialization.png import png_of
from pipeline.system.logging import LOGGER
from pipeline.training.batch_runner import BatchRunner
from pipeline.training.buffers import preserved_buffers
from pipeline.training.step_plan import BatchRef

_MB = 1 << 20
Files = dict[str, bytes]


class Samples:
    """Asks each module transform for what it makes of its first validation batch, by ``images`` or ``artifacts``.

    Nothing they need is drawn from or left in what training uses, and a method that fails is not asked again. The
    modules must be in evaluation mode.
    """

    def __init__(self, experiment: Experiment, processes: Processes, runner: BatchRunner) -> None:
        self._experiment = experiment
        self._processes = processes
        self._runner = runner
        self._max_bytes = experiment.settings.logging.artifacts_max_mb * _MB
        self._failed: set[tuple[str, str]] = set()

    def take_images(self, epoch: int) -> Files:
        """Return PNG files by dataset and name. They are not part of the results."""

        def draw(dataset: str, images: Callable[..., Any]) -> Files:
            return {f"{dataset}/{name}": png_of(image) for name, image in images().items()}

        return self._take("images", "images must return a dict of pictures", epoch, draw)

    def take_artifacts(self, epoch: int) -> Files:
        """Return files by dataset and path, for the commit of the evaluation."""

        def write(dataset: str, artifacts: Callable[..., Any]) -> Files:
            with tempfile.TemporaryDirectory(prefix="artifacts_") as folder:
                artifacts(Path(folder))
                return dict(self._read(Path(folder), dataset, epoch))

        return self._take("artifacts", "artifacts must write its files into the folder", epoch, write)

    def _read(self, folder: Path, dataset: str, epoch: int) -> Iterator[tuple[str, bytes]]:
        paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        num_bytes = sum(path.stat().st_size for path in paths)
        if num_bytes > self._max_bytes:
            limit = self._max_bytes // _MB
            raise ValueError(f"wrote {num_bytes / _MB:.1f} MB, but logging.artifacts.max_mb allows {limit}")
        for path in paths:
            yield f"{dataset}/epoch_{epoch}/{path.relative_to(folder).as_posix()}", path.read_bytes()

    def _take(self, method: str, must: str, epoch: int, collect: Callable[[str, Callable[..., Any]], Files]) -> Files:
        """Call a method of each module transform that has it; ``collect`` gets it with batch and modules filled in."""
        shapes = {shape.dataset: shape for shape in self._runner.shapes if shape.num_batches}
        points = self._runner.points(epoch)
        files = Files()
        for dataset, shape in shapes.items():
            transform = self._experiment.module_transforms[dataset]
            if not hasattr(transform, method) or (method, dataset) in self._failed:
                continue
            ref = BatchRef(shape, 0)
            has_failed = False
            try:
                (loaded,) = self._runner.load([ref], points)
                key = (*points.batch(ref).key, method)
                with torch.no_grad(), preserved_buffers(self._experiment.components.all_modules.values()):
                    files |= collect(dataset, self._runner.bind(method, loaded, ref, key))
            except (Exception, SystemExit) as error:
                # Samples are for people: a mistake in them must not end a training.
                has_failed = True
                where = f"module_transforms/{dataset}.py"
                problem = user_problem(error, self._experiment.folder, where, must)
                LOGGER.warning("%s. Training continues without %s of %s.", problem, method, dataset)
            # Sharded modules take all ranks: if one does not ask again, the others must not, either.
            if self._processes.any(has_failed) if self._experiment.is_sharded else has_failed:
                self._failed.add((method, dataset))
        return files
