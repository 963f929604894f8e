"""Weights & Biases: one run that every start continues, online or in files to be synced later."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.components import BaseTracker, Image, Point, TrackedRun
from pipeline.experiment.settings.settings import WandbSettings

STEP = "step"
_SECONDS = 60
# The server has what was sent until shortly before a kill; that much is looked at again.
_ROWS_LOOKED_AT = 10_000


class Wandb(BaseTracker):
    """Sends one row per step; rows are numbered, and carry the step as a value, because W&B takes each number once.

    Online, only what the server has not got is sent: a kill loses the end of what was sent before it. Offline, a kill
    may lose everything, and what syncing does to several folders of one run differs between versions of W&B. So each
    start writes the whole run into a folder of its own, and the folders it has outgrown are removed.
    """

    def __init__(self, settings: WandbSettings) -> None:
        self._settings = settings
        self._is_online = settings.mode == "online"
        self._last: dict[str, int] = {}
        self._fullest: Path | None = None
        self._row = 0

    def begin(self, run: TrackedRun) -> int | None:
        if not self._is_online:
            # Reports of W&B's own errors would go over the network.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
            self._fullest = _fullest(run)
        import wandb

        self._wandb: Any = wandb
        self._run = self._opened(run)
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        self._row = int(self._run.starting_step)
        if self._row:
            self._learn(self._server_rows())
        return max(self._last.values(), default=0)

    def _opened(self, run: TrackedRun) -> Any:
        return self._wandb.init(
            id=run.run_id,
            name=run.experiment,
            project=self._settings.project,
            entity=self._settings.entity,
            mode=self._settings.mode,
            resume="allow" if self._is_online else None,
            # W&B adds a folder "wandb" of its own.
            dir=run.folder.parent,
            config=run.settings,
            settings=self._wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                disable_code=True,
                init_timeout=_SECONDS,
                login_timeout=_SECONDS,
                finish_timeout=_SECONDS,
            ),
        )

    def _server_rows(self) -> Iterable[Mapping[str, Any]]:
        found = self._wandb.Api(timeout=_SECONDS).run(self._run.path)
        rows: Iterable[Mapping[str, Any]] = found.scan_history(min_step=max(0, self._row - _ROWS_LOOKED_AT))
        return rows

    def _learn(self, rows: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            for tag, value in row.items():
                if value is not None and not tag.startswith("_"):
                    self._last[tag] = max(self._last.get(tag, -1), int(row[STEP]))

    def publish(self, points: list[Point]) -> None:
        rows: dict[int, dict[str, Any]] = defaultdict(dict)
        for point in points:
            if point.step > self._last.get(point.tag, -1):
                rows[point.step][point.tag] = point.value
        self._log(rows)

    def publish_images(self, images: list[Image]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            rows: dict[int, dict[str, Any]] = defaultdict(dict)
            for number, image in enumerate(images):
                if image.step > self._last.get(image.tag, -1):
                    file = Path(folder) / f"{number}.png"
                    file.write_bytes(image.png)
                    rows[image.step][image.tag] = self._wandb.Image(str(file))
            self._log(rows)

    def _log(self, rows: dict[int, dict[str, Any]]) -> None:
        for step, row in sorted(rows.items()):
            self._run.log({STEP: step, **row}, step=self._row, commit=True)
            self._row += 1

    def close(self) -> None:
        self._run.finish()
        # W&B's service process has written everything only when it has ended.
        self._wandb.teardown()
        if self._fullest and _size(self._fullest) <= _size(Path(self._run.settings.sync_file)):
            shutil.rmtree(self._fullest.parent)


def _fullest(run: TrackedRun) -> Path | None:
    """Return which file of earlier starts holds the most; the others, some of them empty, hold the same and go."""
    files = sorted(run.folder.glob(f"offline-run-*-{run.run_id}*/run-*.wandb"), key=_size)
    for file in files[:-1]:
        shutil.rmtree(file.parent)
    return files[-1] if files else None


def _size(file: Path) -> int:
    return file.stat().st_size
