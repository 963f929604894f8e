"""The experiment that is killed, stopped and starved, and what must hold when it has come to its end."""

from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

from pipeline.checkpoint.parts import PersistedParts
from pipeline.paths import ExperimentPaths
from pipeline.store.compare import first_difference, read_any
from pipeline.store.verify import inspect
from tests.support.experiments import FILES, write_experiment

RESULTS = Path("experiment_results/tiny")
LOG = Path("experiment_logs/tiny/train.log")
NUM_STEPS = 5
NUM_EPOCHS = 8
SEED = 5
EVERY_STEPS = 2
GATE, GATE_FOLDER, WITNESS = "TEST_GATE", "TEST_GATE_FOLDER", "TEST_WITNESS"
_STEP = FILES["pymodules/module_transforms/a.py"].replace(
    "outputs = modules",
    """is_training = modules["trunk"].training
                pass_gate("training" if is_training else "validation")
                time.sleep(0.02 if is_training else 0)
                outputs = modules""",
)
EXPERIMENT: dict[str, str | None] = {
    # A rank that is to be caught waits at its gate: "training:1:3" is the third training batch of rank 1.
    "pymodules/utils/gates.py": f"""
        import os
        import time
        from pathlib import Path

        _passed = {{}}


        def pass_gate(phase):
            _passed[phase] = _passed.get(phase, 0) + 1
            if os.environ.get("{GATE}") == f"{{phase}}:{{os.environ.get('RANK', '0')}}:{{_passed[phase]}}":
                folder = Path(os.environ["{GATE_FOLDER}"])
                (folder / "reached").touch()
                while not (folder / "open").exists():
                    time.sleep(0.005)
    """,
    "pymodules/module_transforms/a.py": _STEP.replace(
        "from pipeline.components import BaseModuleTransform",
        "import time\n\n        from pipeline.components import BaseModuleTransform\n\n"
        "        from ..utils.gates import pass_gate",
        1,
    ),
    "pymodules/modules/head_a.py": """
        from torch import nn

        from ..utils.gates import pass_gate

        pass_gate("initialisation")
        module = nn.Linear(8, 1)
        settings = {}
    """,
    # It is saved in every commit, while the folder of the new generation is there, and called on every rank. What ranks
    # save to be compared is not part of one.
    "pymodules/loss_weighter.py": f"""
        import os

        from pipeline.components import MovingAverageLossWeighter

        from .utils.gates import pass_gate


        class Weighter(MovingAverageLossWeighter):
            def save(self, folder):
                if "compared_" not in str(folder):
                    pass_gate("commit")
                super().save(folder)

            def after_train_step(self, losses):
                super().after_train_step(losses)
                if "{WITNESS}" in os.environ:
                    with open(os.environ["{WITNESS}"] + os.environ.get("RANK", "0"), "a") as file:
                        file.write("step\\n")


        loss_weighter = Weighter(decay=0.8)
    """,
    "pymodules/dataloaders/a.py": """
        train_dataloader_args = {"batch_size": 4, "num_workers": 1, "prefetch_factor": 2}
        eval_dataloader_args = {"batch_size": 4, "num_workers": 0}
    """,
    "pymodules/early_stopper.py": f"""
        from pipeline.components import WeightedLossEarlyStopper

        early_stopper = WeightedLossEarlyStopper(max_epochs={NUM_EPOCHS})
    """,
}


def prepare(home: Path, files: dict[str, str | None] | None = None, **training: Any) -> None:
    """Write the experiment: all of the tiny one's traps, a loader worker, slower steps, gates, a line per step."""
    write_experiment(
        home,
        files={**EXPERIMENT, **(files or {})},
        logging={"progress_bar": {"enabled": False}, "text": {"every_steps": 1}},
        training={"seed": SEED, "checkpoint_every_steps": EVERY_STEPS, **training},
    )


def committed(home: Path) -> dict[str, Any]:
    """Return what state.json says, nothing before the first commit."""
    try:
        state: dict[str, Any] = json.loads((home / RESULTS / "state.json").read_text())
    except FileNotFoundError:
        return {}
    return state


def is_finished(home: Path) -> bool:
    return bool(committed(home)) and committed(home)["progress"]["stage"] == "finished"


def is_writing(home: Path) -> bool:
    """Return whether a commit is being written, or was when the run died."""
    try:
        return any((home / RESULTS / "temp_data").glob("claim_*/generation_*"))
    except FileNotFoundError:
        # The claim has gone between two looks at it.
        return False


def log_text(home: Path) -> str:
    return (home / LOG).read_text() if (home / LOG).exists() else ""


def last_logged_step(home: Path) -> int:
    """Return the number of steps since the start of the experiment that the latest line of a step tells of."""
    return max((_place(*found) for found in re.findall(r"Epoch\(train\) \[(\d+)\]\[(\d+)/", log_text(home))), default=0)


def last_committed_step(home: Path) -> int:
    progress = committed(home).get("progress", {"stage": "training", "epoch": 1, "step": 0})
    is_training = progress["stage"] == "training"
    return _place(progress["epoch"], progress["step"] if is_training else NUM_STEPS)


def _place(epoch: str | int, step: str | int) -> int:
    return NUM_STEPS * max(0, int(epoch) - 1) + (int(step) if int(epoch) else 0)


def redone_steps(home: Path) -> list[int]:
    """Return, for each start but the first, how many steps had been taken that it must take again."""
    taken, redone = 0, []
    for line in log_text(home).splitlines():
        if step := re.search(r"Epoch\(train\) \[(\d+)\]\[(\d+)/", line):
            taken = _place(step[1], step[2])
        elif place := re.search(r"state: continues at epoch (\d+), (?:training, step (\d+)|evaluation)", line):
            redone.append(taken - _place(place[1], place[2] or NUM_STEPS))
    return redone


def record_faults(home: Path) -> tuple[int, int]:
    """Return how many entries of the records are there more than once, and how many are missing."""
    records = home / RESULTS / "data/loss_reg_data"
    steps, epochs = list(range(1, NUM_STEPS + 1)), list(range(NUM_EPOCHS + 1))
    registers = [path.name for path in sorted((records / "val").iterdir())]
    expected = {f"train/{name}/step_data_{epoch}.npz": steps for name in registers for epoch in epochs[1:]}
    expected |= {f"val/{name}/epoch_data.npz": epochs for name in registers}
    expected |= {f"train/{name}/epoch_data.npz": epochs[1:] for name in registers}
    optimizers = [path.name for path in sorted((home / RESULTS / "data/lr_data").iterdir())]
    expected |= {
        f"../lr_data/{name}/step_data_{epoch}.npz": steps for name in optimizers for epoch in range(1, NUM_EPOCHS + 1)
    }
    found = [(_numbers(records / path), numbers) for path, numbers in expected.items()]
    duplicated = sum(len(there) - len(set(there)) for there, _ in found)
    return duplicated, sum(len(set(numbers) - set(there)) for there, numbers in found)


def _numbers(path: Path) -> list[int]:
    values = read_any(path) if path.exists() else {"steps": []}
    return list(map(int, values["steps"] if "steps" in values else values["epochs"]))


def left_over(reference: Path, home: Path) -> list[Path]:
    """Return what a finished experiment should not have, anywhere below the data home.

    Temporary files, strays, names the reference has not, and hidden entries, as starts and resets make them.
    """
    names = {path.name for path in (reference / RESULTS).iterdir()}
    foreign = [path for path in (home / RESULTS).iterdir() if path.name not in names]
    found = inspect(ExperimentPaths(home, "tiny"), PersistedParts.is_needed)
    hidden = [path for path in home.rglob(".*") if path.name != ".metadata"]
    return list(dict.fromkeys(chain(foreign, found.strays, hidden, (home / RESULTS / "temp_data").iterdir())))


def check_same(reference: Path, home: Path) -> None:
    """Every tensor, record and component file has the same bits, every step is there once, nothing is left over."""
    difference = first_difference(reference / RESULTS / "data", home / RESULTS / "data")
    assert difference is None, difference
    assert record_faults(home) == (0, 0), f"(duplicated, missing) records: {record_faults(home)}"
    assert left_over(reference, home) == [], left_over(reference, home)
    inspection = inspect(ExperimentPaths(home, "tiny"), PersistedParts.is_needed)
    assert inspection.is_clean, inspection
    assert all(0 <= count <= 2 * EVERY_STEPS for count in redone_steps(home)), redone_steps(home)
