"""Weights & Biases: one run that every start continues, online or in files to be synced later."""

from __future__ import annotations

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.components import BaseTracker, Image, Point, TrackedRun
from pipeline.experiment.settings import WandbSettings
from pipeline.tracking.wandb_files import history_rows

STEP = "step"
_SECONDS = 60
# The server has what was sent until shortly before a kill; that much is looked at again.
_ROWS_LOOKED_AT = 10_000


class Wandb(BaseTracker):
    """Sends one row per step, and only what the run does not have yet.

    Rows are numbered through all starts and carry the step as a value, because W&B drops rows whose number it has had.
    What a kill has lost is always the end of what was sent: W&B buffers rows for seconds or, offline, for many of them.
    """

    def __init__(self, settings: WandbSettings) -> None:
        self._settings = settings
        self._last: dict[str, int] = {}

    def begin(self, run: TrackedRun) -> int | None:
        if self._settings.mode == "offline":
            # Reports of W&B's own errors would go over the network.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._wandb: Any = wandb
        earlier = sorted(run.folder.glob(f"*-{run.run_id}*/run-{run.run_id}.wandb"))
        self._run = self._opened(run)
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        if self._settings.mode == "online":
            self._row = int(self._run.starting_step)
            self._learn(self._server_rows() if self._row else [])
        else:
            self._row = 0
            for file in earlier:
                self._learn({tag: json.loads(text) for tag, text in row.items()} for row in history_rows(file))
        return max(self._last.values(), default=0)

    def _opened(self, run: TrackedRun) -> Any:
        is_online = self._settings.mode == "online"
        return self._wandb.init(
            id=run.run_id,
            name=run.experiment,
            project=self._settings.project,
            entity=self._settings.entity,
            mode=self._settings.mode,
            resume="allow" if is_online else None,
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
            self._row = max(self._row, int(row["_step"]) + 1)
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
