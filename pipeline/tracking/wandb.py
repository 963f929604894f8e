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
from pipeline.experiment.settings.settings import LoggingSettings, WandbSettings

STEP = "step"
_TIMEOUT_SECONDS = 60
# The server has what was sent until shortly before a kill; so many of its last rows are read to find out where it ends.
_MAX_ROWS_READ = 10_000


class Wandb(BaseTracker):
    """Sends one row per step; rows are numbered, and carry the step as a value, because W&B takes each number once.

    Online, only what the server has not got is sent: a kill loses the end of what was sent before it. Offline, a kill
    may lose everything, and what syncing does to several folders of one run differs between versions of W&B. So each
    start writes the whole run into a folder of its own, and the folders it has outgrown are removed.
    """

    @classmethod
    def from_settings(cls, logging: LoggingSettings) -> Wandb | None:
        return cls(logging.wandb) if logging.wandb.enabled else None

    def __init__(self, settings: WandbSettings) -> None:
        self._settings = settings
        self._is_online = settings.mode == "online"
        self._last: dict[str, int] = {}
        self._fullest_file: Path | None = None
        self._row = 0

    def begin(self, run: TrackedRun) -> int | None:
        if not self._is_online:
            # Reports of W&B's own errors would go over the network.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
            self._fullest_file = _keep_fullest_file(_folder_of(run) / "wandb", run.run_id)
        # Only now: W&B reads the variable when it is imported.
        import wandb

        self._wandb: Any = wandb
        self._run = self._open_run(run)
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        self._row = int(self._run.starting_step)
        # A row may lack some of the values, so where the server's series ends is known for each tag on its own.
        for row in self._read_server_rows() if self._row else ():
            for tag, value in row.items():
                if value is not None and not tag.startswith("_"):
                    self._last[tag] = max(self._last.get(tag, -1), int(row[STEP]))
        return max(self._last.values(), default=0)

    def _open_run(self, run: TrackedRun) -> Any:
        return self._wandb.init(
            id=run.run_id,
            name=run.experiment,
            project=self._settings.project,
            entity=self._settings.entity,
            mode=self._settings.mode,
            resume="allow" if self._is_online else None,
            # W&B adds a folder "wandb" of its own.
            dir=_folder_of(run),
            config=run.settings,
            settings=self._wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                disable_code=True,
                init_timeout=_TIMEOUT_SECONDS,
                login_timeout=_TIMEOUT_SECONDS,
                finish_timeout=_TIMEOUT_SECONDS,
            ),
        )

    def _read_server_rows(self) -> Iterable[Mapping[str, Any]]:
        server_run = self._wandb.Api(timeout=_TIMEOUT_SECONDS).run(self._run.path)
        rows: Iterable[Mapping[str, Any]] = server_run.scan_history(min_step=max(0, self._row - _MAX_ROWS_READ))
        return rows

    def publish(self, points: list[Point]) -> None:
        rows: dict[int, dict[str, object]] = defaultdict(dict)
        for point in points:
            if point.step > self._last.get(point.tag, -1):
                rows[point.step][point.tag] = point.value
        self._log(rows)

    def publish_images(self, images: list[Image]) -> None:
        # W&B reads the files while a row is logged, so they must be there until then.
        with tempfile.TemporaryDirectory() as folder:
            rows: dict[int, dict[str, object]] = defaultdict(dict)
            for number, image in enumerate(images):
                if image.step > self._last.get(image.tag, -1):
                    file = Path(folder) / f"{number}.png"
                    file.write_bytes(image.png)
                    rows[image.step][image.tag] = self._wandb.Image(str(file))
            self._log(rows)

    def _log(self, rows: dict[int, dict[str, object]]) -> None:
        for step, row in sorted(rows.items()):
            self._run.log({STEP: step, **row}, step=self._row, commit=True)
            self._row += 1

    def close(self) -> None:
        self._run.finish()
        # W&B's service process has written everything only when it has ended.
        self._wandb.teardown()
        # Not before: a start that is killed early holds less than the fullest of those before it.
        if self._fullest_file and _size(self._fullest_file) <= _size(Path(self._run.settings.sync_file)):
            shutil.rmtree(self._fullest_file.parent)


def _folder_of(run: TrackedRun) -> Path:
    """Return where W&B keeps its folder: with the logs, or where its own variable says."""
    return Path(os.environ.get("WANDB_DIR") or run.folder.parent)


def _keep_fullest_file(folder: Path, run_id: str) -> Path | None:
    """Return which file of earlier starts holds the most; the others, some of them empty, hold the same and go."""
    files = sorted(folder.glob(f"offline-run-*-{run_id}*/run-*.wandb"), key=_size)
    for file in files[:-1]:
        shutil.rmtree(file.parent)
    return files[-1] if files else None


def _size(file: Path) -> int:
    return file.stat().st_size
