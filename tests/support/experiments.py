"""A tiny experiment that has everything that can go wrong: two datasets, a frozen module, BatchNorm, dropout,
augmentation from three generators, a weighter that looks at every step, warm-up and epoch pools."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent
from typing import Any

FILES = {
    "pymodules/utils/points.py": """
        import random

        import numpy as np
        import torch

        from pipeline.components import BaseDataset


        class Points(BaseDataset):
            def __init__(self, num_points, offset):
                generator = np.random.default_rng(offset)
                self.inputs = generator.normal(size=(num_points, 6)).astype(np.float32)
                self.targets = self.inputs.sum(axis=1) + offset

            def __getitem__(self, idx):
                return {"x": self.inputs[idx].copy(), "y": np.float32(self.targets[idx]), "idx": idx}

            def get_split_idxs(self, split):
                idxs = range(len(self.targets))
                return [idx for idx in idxs if (idx % 5 == 0) == (split == "val")]

            def getitem_metadata(self, idx):
                return {"side": int(self.targets[idx] > 0)}


        def augment(point):
            noise = random.gauss(0, 0.1) + np.random.normal(0, 0.1) + torch.randn(()).item() * 0.1
            point["x"] = point["x"] + np.float32(noise)
    """,
    "pymodules/datasets/a.py": "from ..utils.points import Points\n\ndataset = Points(50, 0)\n",
    "pymodules/datasets/b.py": "from ..utils.points import Points\n\ndataset = Points(30, 1)\n",
    "pymodules/data_counters/sides.py": """
        from pipeline.components import CategoryCounter

        data_counter = CategoryCounter("side", 2)
        dataset_names = ["a", "b"]
    """,
    "pymodules/data_transforms/a.py": """
        from pipeline.components import BaseDataTransform

        from ..utils.points import augment


        class TrainDataTransform(BaseDataTransform):
            def __call__(self, data_point):
                augment(data_point)


        class EvalDataTransform(BaseDataTransform):
            pass
    """,
    "pymodules/data_transforms/b.py": """
        from .a import EvalDataTransform, TrainDataTransform
    """,
    "pymodules/dataloaders/a.py": """
        train_dataloader_args = {"batch_size": 4, "num_workers": 0}
        eval_dataloader_args = {"batch_size": 4, "num_workers": 0}
    """,
    "pymodules/dataloaders/b.py": """
        train_dataloader_args = {"batch_size": 3, "num_workers": 0}
        eval_dataloader_args = {"batch_size": 4, "num_workers": 0}
    """,
    "pymodules/modules/stem.py": """
        from torch import nn

        module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
        settings = {"frozen": True}
    """,
    "pymodules/modules/trunk.py": """
        from torch import nn

        module = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))
        settings = {"frozen": False}
    """,
    "pymodules/modules/head_a.py": "from torch import nn\n\nmodule = nn.Linear(8, 1)\nsettings = {}\n",
    "pymodules/modules/head_b.py": "from torch import nn\n\nmodule = nn.Linear(8, 1)\nsettings = {}\n",
    "pymodules/module_transforms/a.py": """
        from pipeline.components import BaseModuleTransform

        loss_registers = ["loss_a", "error"]


        class ModuleTransform(BaseModuleTransform):
            head = "head_a"
            register = "loss_a"

            def __call__(self, batch, modules):
                outputs = modules[self.head](modules["trunk"](modules["stem"](batch["x"])))[:, 0]
                difference = outputs - batch["y"]
                return {self.register: difference**2, "error": difference.detach().abs()}
    """,
    "pymodules/module_transforms/b.py": """
        from . import a

        loss_registers = ["loss_b", "error"]


        class ModuleTransform(a.ModuleTransform):
            head = "head_b"
            register = "loss_b"
    """,
    "pymodules/optim_sched/heads.py": """
        from torch.optim import SGD

        from pipeline.components import BaseScheduler


        def create_optimizer(modules):
            params = [*modules["head_a"].parameters(), *modules["head_b"].parameters()]
            return SGD([{"name": "heads", "params": params}], lr=0.02, momentum=0.9)


        def create_scheduler(optimizer):
            return BaseScheduler()
    """,
    "pymodules/optim_sched/trunk.py": """
        from torch.optim import AdamW
        from torch.optim.lr_scheduler import StepLR

        from pipeline.components import TorchScheduler, WarmupScheduler


        def create_optimizer(modules):
            return AdamW([{"name": "trunk", "params": modules["trunk"].parameters()}], lr=0.01)


        def create_scheduler(optimizer):
            return WarmupScheduler(optimizer, 1, TorchScheduler(StepLR(optimizer, step_size=2, gamma=0.7), per="step"))
    """,
    "pymodules/checkpoint_saver.py": """
        from pipeline.components import PeriodicCheckpointSaver

        checkpoint_saver = PeriodicCheckpointSaver(every_epochs=1, num_to_keep=2)
    """,
    "pymodules/early_stopper.py": """
        from pipeline.components import WeightedLossEarlyStopper

        early_stopper = WeightedLossEarlyStopper(max_epochs=3)
    """,
    "pymodules/loss_weighter.py": """
        from pipeline.components import MovingAverageLossWeighter

        loss_weighter = MovingAverageLossWeighter(decay=0.8)
    """,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "data_loading": {"step_min_items": 14},
    "logging": {"progress_bar": {"enabled": False}, "text": {"every_steps": 2}},
    "loss_registers": {"loss_registers": ["loss_a", "loss_b", {"name": "error", "optimize": False}]},
    "training": {"seed": 3, "checkpoint_every_steps": 2, "grad_clip_norm": 5.0},
}


def write_experiment(
    home: Path, name: str = "tiny", files: dict[str, str | None] | None = None, **settings: Any
) -> Path:
    """Write the tiny experiment with some files replaced (None: left out) and some settings updated.

    ``settings`` are keyed by file: ``training={"seed": 4}``. Returns the experiment's settings folder.
    """
    folder = home / "experiment_settings" / name
    contents: dict[str, str | None] = {**FILES, **(files or {})}
    for file in SETTINGS:
        contents[f"settings/{file}.json"] = json.dumps({**SETTINGS[file], **settings.get(file, {})}, indent=2) + "\n"
    contents |= files or {}
    for path, text in contents.items():
        if text is not None:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(dedent(text).lstrip("\n"))
    return folder


def tree(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return every file below a folder with its bytes and its time stamp."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}
