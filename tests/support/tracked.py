"""The tiny experiment with every tracker there is, an own one that writes lines, and images."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

from tests.support.experiments import FILES, write_experiment
from tests.support.mirrors import Series

LOGGING: dict[str, Any] = {
    "tensorboard": {"enabled": True},
    "wandb": {"enabled": True, "mode": "offline"},
    "mlflow": {"enabled": True},
}
DOCUMENTED_TRACKER = re.findall(
    r"^```python\n(.*?)^```$",
    (Path(__file__).parents[2] / "docs/reference/pymodules/trackers.md").read_text(),
    re.MULTILINE | re.DOTALL,
)[0]
OWN_TRACKER = """
    import json

    from pipeline.components import BaseTracker


    class Lines(BaseTracker):
        def begin(self, run):
            self.file = (run.folder / "lines.jsonl").open("a")
            self.write({"run_id": run.run_id, "first_step": run.first_step, "seed": run.settings["training"]["seed"]})

        def write(self, line):
            self.file.write(json.dumps(line) + "\\n")
            self.file.flush()

        def publish(self, points):
            for tag, step, value in points:
                self.write({"tag": tag, "step": step, "value": value})


    tracker = Lines()
"""
IMAGES = """
            def images(self, batch, modules):
                import numpy as np
                import torch

                # Whatever it does to generators and buffers must not be felt by the training.
                torch.randn(3), np.random.rand()
                for buffer in modules["trunk"].buffers():
                    buffer.add_(1)
                outputs = modules["trunk"](modules["stem"](batch["x"]))
                return {"inputs": batch["x"].sigmoid(), "trunk outputs": outputs.sigmoid()}
"""


def with_images(module_transform: str) -> str:
    """Return a module transform of the tiny experiment that has images."""
    return module_transform.rstrip().rstrip("\n") + "\n" + IMAGES


def write_tracked(home: Path, files: dict[str, str | None] | None = None, **settings: Any) -> Path:
    """Write the tiny experiment with trackers; dataset b inherits the images of a."""
    transform = with_images(FILES["pymodules/module_transforms/a.py"])
    own = {
        "pymodules/trackers/lines.py": OWN_TRACKER,
        "pymodules/trackers/table.py": DOCUMENTED_TRACKER,
        "pymodules/module_transforms/a.py": transform,
    }
    logging = {"progress_bar": {"enabled": False}, **LOGGING}
    return write_experiment(home, files={**own, **(files or {})}, logging=logging, **settings)


def own_lines(logs: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (logs / "trackers/lines/lines.jsonl").read_text().splitlines()]


def own_series(logs: Path) -> Series:
    """Return what the own tracker was told, where each start takes back all from its first step on."""
    points: dict[tuple[str, int], float] = {}
    for line in own_lines(logs):
        if "run_id" in line:
            points = {place: value for place, value in points.items() if place[1] < line["first_step"]}
        else:
            assert (line["tag"], line["step"]) not in points, f"{line} is there twice"
            points[line["tag"], line["step"]] = line["value"]
    series: Series = {}
    for (tag, step), value in sorted(points.items()):
        series.setdefault(tag, []).append((step, value))
    return series


def documented_series(logs: Path) -> Series:
    """Return what the example in the documentation has written."""
    series: Series = {}
    with (logs / "trackers/table/points.csv").open(newline="") as file:
        for tag, step, value in csv.reader(file):
            series.setdefault(tag, []).append((int(step), float(value)))
    return series
