"""Campaigns: a real run is killed again and again, resumed, and compared with one that never was."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.results.comparison import first_difference
from tests.support.experiments import FILES, write_experiment
from tests.support.running import BackgroundRun, run_process

RESULTS = Path("experiment_results/tiny")
_SLOW_STEP = FILES["pymodules/module_transforms/a.py"].replace(
    "outputs = modules", "time.sleep(0.02 if modules['trunk'].training else 0)\n                outputs = modules"
)
EXPERIMENT: dict[str, str | None] = {
    "pymodules/module_transforms/a.py": _SLOW_STEP.replace(
        "from pipeline.components", "import time\n\n        from pipeline.components", 1
    ),
    "pymodules/dataloaders/a.py": """
        train_dataloader_args = {"batch_size": 4, "num_workers": 1, "prefetch_factor": 2}
        eval_dataloader_args = {"batch_size": 4, "num_workers": 0}
    """,
    "pymodules/early_stopper.py": """
        from pipeline.components import WeightedLossEarlyStopper

        early_stopper = WeightedLossEarlyStopper(max_epochs=5)
    """,
}


@dataclass(frozen=True)
class Life:
    """One killed process group: where it was aimed at and where it had come to."""

    aim: str
    progress: dict[str, Any]


def prepare(home: Path, **training: Any) -> None:
    """Write the experiment of the campaigns: all of the tiny one's traps, a loader worker and slower steps."""
    write_experiment(home, files=EXPERIMENT, training={"seed": 5, "checkpoint_every_steps": 1, **training})


def survive_kills(home: Path, nproc: int, num_kills: int, seed: int) -> Iterator[Life]:
    """Kill a run ``num_kills`` times at instants drawn from ``seed``, resuming each time, and let it finish."""
    draw = random.Random(seed)
    for number in range(num_kills):
        aim = "write" if number % 2 else "random"
        with BackgroundRun(home, "--auto", nproc=nproc) as run:
            before = _progress(home)
            run.wait_for(lambda before=before: _progress(home) != before or _is_finished(home))
            _wait_for_instant(home, run, aim, draw)
            run.kill()
        yield Life(aim, _progress(home))
    done = run_process(home, "--auto", nproc=nproc)
    assert done.returncode == 0, done.stderr


def _wait_for_instant(home: Path, run: BackgroundRun, aim: str, draw: random.Random) -> None:
    if aim == "random":
        time.sleep(draw.uniform(0, 0.6))
        return
    for _ in range(draw.randint(1, 4)):
        run.wait_for(lambda: _is_writing(home) or _is_finished(home))
        time.sleep(draw.uniform(0, 0.01))


def _is_writing(home: Path) -> bool:
    return any((home / RESULTS / "temp_data").glob("claim_*/generation_*"))


def _progress(home: Path) -> dict[str, Any]:
    try:
        progress: dict[str, Any] = json.loads((home / RESULTS / "state.json").read_text())["progress"]
    except FileNotFoundError:
        return {}
    return progress


def _is_finished(home: Path) -> bool:
    return _progress(home).get("stage") == "finished"


def check_same(reference: Path, home: Path) -> None:
    """Every tensor, record and component file has the same bits, every step is there once, nothing is left over."""
    left, right = reference / RESULTS, home / RESULTS
    assert first_difference(left / "data", right / "data") is None
    assert not list((right / "temp_data").iterdir())
    for path in (right / "data/loss_reg_data/train").rglob("step_data_*.npz"):
        with np.load(path) as arrays:
            assert arrays["steps"].tolist() == list(range(1, 6))
