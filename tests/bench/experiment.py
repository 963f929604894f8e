"""The same work as an experiment for the pipeline, with default logging."""

from __future__ import annotations

import json
from pathlib import Path

from tests.bench.work import BATCH_SIZE, WORLD_SIZE

_FILES = {
    "datasets/points.py": """
from tests.bench.work import Points, num_points

dataset = Points(num_points("{kind}"))
""",
    "data_transforms/points.py": """
from pipeline.components import BaseDataTransform as EvalDataTransform
from pipeline.components import BaseDataTransform as TrainDataTransform
""",
    "dataloaders/points.py": """
train_dataloader_args = {{"batch_size": {batch_size}}}
eval_dataloader_args = {{"batch_size": {batch_size}}}
""",
    "modules/model.py": """
from tests.bench.work import make_model

module = make_model("{kind}")
settings = {{}}
""",
    "module_transforms/points.py": """
import torch.nn.functional as F

from pipeline.components import BaseModuleTransform

loss_registers = ["loss_entropy"]


class ModuleTransform(BaseModuleTransform):
    def __call__(self, batch, modules):
        return {{"loss_entropy": F.cross_entropy(modules["model"](batch["x"]), batch["y"], reduction="none")}}
""",
    "optim_sched/main.py": """
from torch.optim import AdamW

from pipeline.components import BaseScheduler


def create_optimizer(modules):
    return AdamW([{{"name": "all", "params": modules["model"].parameters()}}], lr=1e-3)


def create_scheduler(optimizer):
    return BaseScheduler()
""",
    "checkpoint_saver.py": """
from pipeline.components import BaseCheckpointSaver

checkpoint_saver = BaseCheckpointSaver()
""",
    "early_stopper.py": """
from pipeline.components import WeightedLossEarlyStopper

early_stopper = WeightedLossEarlyStopper(max_epochs={num_epochs})
""",
    "loss_weighter.py": """
from pipeline.components import BaseLossWeighter
from tests.bench.turns import Turn


class TurnTaker(BaseLossWeighter):
    def __init__(self):
        self.turn = Turn()

    def before_train_epoch(self, losses):
        self.turn.wait()

    def after_train_epoch(self, losses):
        self.turn.done()


loss_weighter = TurnTaker()
""",
}
_SETTINGS = {
    "data_loading": {"step_min_items": BATCH_SIZE * WORLD_SIZE},
    "logging": {"progress_bar": {"enabled": True}},
    "loss_registers": {"loss_registers": ["loss_entropy"]},
}


def write(home: Path, name: str, kind: str, num_epochs: int) -> None:
    """Write an experiment into a data home."""
    folder = home / "experiment_settings" / name
    for file, text in _FILES.items():
        path = folder / "pymodules" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(kind=kind, num_epochs=num_epochs, batch_size=BATCH_SIZE).lstrip())
    (folder / "settings").mkdir()
    for file, content in _SETTINGS.items():
        (folder / "settings" / f"{file}.json").write_text(json.dumps(content))
