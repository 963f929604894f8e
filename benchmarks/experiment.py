"""The same work as an experiment for the pipeline, with default logging."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.turns import WITH, Job
from benchmarks.work import DATASETS, KINDS, REGISTERS

_DATASET = {
    "datasets": """
from benchmarks.work import KINDS, Points

dataset = Points(KINDS["{kind}"], {seed})
""",
    "data_transforms": """
from pipeline.components import BaseDataTransform as EvalDataTransform
from pipeline.components import BaseDataTransform as TrainDataTransform
""",
    "dataloaders": """
train_dataloader_args = {{"batch_size": {batch_size}, "num_workers": {num_workers}}}
eval_dataloader_args = {{"batch_size": {batch_size}}}
""",
}
_SINGLE = {
    "modules/model.py": """
from benchmarks.work import KINDS, make_model

module = make_model(KINDS["{kind}"])
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
}
_PLAYERS = """
import torch
import torch.nn.functional as F

from pipeline.components import BaseModuleTransform

loss_registers = ["d_loss", "g_loss"]


class ModuleTransform(BaseModuleTransform):
    def __call__(self, batch, modules):
        real = F.one_hot(batch["y"], 10).float()
        drawn = modules["model"](batch["x"])
        scores = modules["judge"](torch.cat([real, drawn]))[:, 0]
        of_real, of_drawn = scores.chunk(2)
        return {"d_loss": F.softplus(-of_real) + F.softplus(of_drawn), "g_loss": F.softplus(-of_drawn)}
"""
_PLAYERS_IN_TURN = """
import torch
import torch.nn.functional as F

from pipeline.components import BaseModuleTransform

loss_registers = ["d_loss", "g_loss"]


class ModuleTransform(BaseModuleTransform):
    def __call__(self, batch, modules):
        judge = modules["judge"]
        losses = {}
        if self.position.turn == 0 or not judge.training:
            real = F.one_hot(batch["y"], 10).float()
            with torch.no_grad():
                drawn = modules["model"](batch["x"])
            of_real, of_drawn = judge(torch.cat([real, drawn]))[:, 0].chunk(2)
            losses["d_loss"] = F.softplus(-of_real) + F.softplus(of_drawn)
        if self.position.turn == 1 or not judge.training:
            losses["g_loss"] = F.softplus(-judge(modules["model"](batch["x"]))[:, 0])
        return losses
"""
_PLAYER = """
from torch.optim import AdamW

loss_registers = ["{register}"]


def create_optimizer(modules):
    return AdamW(modules["{module}"].parameters(), lr=1e-3)
"""
_JUDGE = """
from benchmarks.work import KINDS, make_judge

module = make_judge(KINDS["turns"])
"""
# What kinds of work with a feature have in place of the files above, or besides them.
_FEATURES = {
    "tokens": {
        "module_transforms/points.py": """
import torch.nn.functional as F

from pipeline.components import BaseModuleTransform
from benchmarks.work import IGNORED, mask_labels

loss_registers = ["loss_entropy"]


class ModuleTransform(BaseModuleTransform):
    def __call__(self, batch, modules):
        scores, targets = modules["model"](batch["x"]), mask_labels(batch["y"])
        return {"loss_entropy": F.cross_entropy(scores, targets, ignore_index=IGNORED, reduction="none")}
""",
    },
    "tokens_with": {
        "module_transforms/points.py": """
import torch.nn.functional as F

from pipeline.components import BaseModuleTransform
from benchmarks.work import FIRST_COUNTED, IGNORED, mask_labels

loss_registers = ["loss_entropy"]


class ModuleTransform(BaseModuleTransform):
    def count_items(self, batch):
        return {"loss_entropy": (batch["y"] >= FIRST_COUNTED).sum()}

    def __call__(self, batch, modules):
        scores, targets = modules["model"](batch["x"]), mask_labels(batch["y"])
        return {"loss_entropy": F.cross_entropy(scores, targets, ignore_index=IGNORED, reduction="none")}
""",
    },
    "rows": {
        "module_transforms/points.py": """
from pipeline.components import BaseModuleTransform
from benchmarks.work import contrast

loss_registers = ["loss_entropy"]


class ModuleTransform(BaseModuleTransform):
    def __call__(self, batch, modules):
        return {"loss_entropy": contrast(modules["model"](batch["x"]), batch["y"])}
""",
    },
    "rows_with": {
        "module_transforms/points.py": """
from pipeline.components import BaseModuleTransform
from benchmarks.work import contrast

loss_registers = ["loss_entropy"]


class ModuleTransform(BaseModuleTransform):
    def embed(self, batch, modules):
        return {"rows": modules["model"](batch["x"]), "labels": batch["y"]}

    def loss(self, rows, modules):
        return {"loss_entropy": contrast(rows["rows"], rows["labels"])}
""",
    },
    "turns": {
        "modules/judge.py": _JUDGE,
        "module_transforms/points.py": _PLAYERS,
    },
    "turns_with": {
        "modules/judge.py": _JUDGE,
        "module_transforms/points.py": _PLAYERS_IN_TURN,
        "optim_sched/main.py": _PLAYER.format(register="g_loss", module="model"),
        "optim_sched/judge.py": _PLAYER.format(register="d_loss", module="judge"),
    },
    "average_with": {"modules/ema.py": 'settings = {"average_of": "model", "decay": 0.999, "evaluate": None}\n'},
    "metrics_with": {
        "metrics/f1.py": "from pipeline.components import F1\n\nmetric = F1(10)\n",
        "metrics/miou.py": "from pipeline.components import MeanIoU\n\nmetric = MeanIoU(10)\n",
        "metrics/first.py": "from pipeline.components import AUROC\n\nmetric = AUROC()\n",
        "module_transforms/points.py": """
import torch.nn.functional as F

from pipeline.components import BaseModuleTransform

loss_registers = ["loss_entropy"]
metrics = ["f1", "miou", "first"]


class ModuleTransform(BaseModuleTransform):
    def __call__(self, batch, modules):
        scores, labels = modules["model"](batch["x"]), batch["y"]
        return {
            "loss_entropy": F.cross_entropy(scores, labels, reduction="none"),
            "f1": (scores, labels),
            "miou": (scores, labels),
            "first": (scores[:, 0], labels == 0),
        }
""",
    },
}
# The turn is an evaluation there, not a training epoch.
_EVALUATED = {"metrics"}
_MANY_MODULE = """
from benchmarks.work import make_parts

module = make_parts()["{name}"]
settings = {{}}
"""
_MANY_TRANSFORM = """
from pipeline.components import BaseModuleTransform
from benchmarks.work import REGISTERS, task_losses

loss_registers = REGISTERS["{name}"]


class ModuleTransform(BaseModuleTransform):
    def __call__(self, batch, modules):
        return task_losses("{name}", batch, modules)
"""
_OPTIMIZER = """
from torch.optim import AdamW

from pipeline.components import BaseScheduler
from benchmarks.turns import own_turn


class StepMarker(BaseScheduler):
    def after_train_step(self, step):
        own_turn().step()


def create_optimizer(modules):
    return AdamW([{{"name": name, "params": modules[name].parameters()}} for name in {modules}], lr=1e-3)


def create_scheduler(optimizer):
    return {scheduler}()
"""
_POLICIES = {
    "checkpoint_saver.py": """
from pipeline.components import BaseCheckpointSaver, PeriodicCheckpointSaver

checkpoint_saver = {saver}
""",
    "early_stopper.py": """
from pipeline.components import WeightedLossEarlyStopper

early_stopper = WeightedLossEarlyStopper(max_epochs={num_epochs})
""",
    "loss_weighter.py": """
from pipeline.components import BaseLossWeighter
from benchmarks.turns import own_turn


class TurnTaker(BaseLossWeighter):
    def before_train_epoch(self, losses):
        own_turn().wait()

    def after_train_epoch(self, losses):
        own_turn().done()


loss_weighter = TurnTaker()
""",
}


def write(job: Job) -> None:
    """Write a job as an experiment of its name into its folder."""
    kind = KINDS[job.kind]
    datasets = DATASETS if job.kind == "many" else ["points"]
    texts = {f"{family}/{name}.py": text for family, text in _DATASET.items() for name in datasets}
    texts |= _POLICIES | ({} if job.kind == "many" else _SINGLE)
    values = {
        "kind": job.kind,
        "batch_size": kind.batch_size,
        "num_workers": kind.num_workers,
        "num_epochs": job.num_epochs,
        "saver": f"PeriodicCheckpointSaver({job.pool_period})" if job.pool_period else "BaseCheckpointSaver()",
    }
    if job.kind in _EVALUATED:
        texts["loss_weighter.py"] = texts["loss_weighter.py"].replace("train_epoch", "eval_epoch")
    pymodules = Path(job.folder) / "experiment_settings" / job.name / "pymodules"
    for file, text in texts.items():
        seed = datasets.index(Path(file).stem) if Path(file).stem in datasets else 0
        _write(pymodules / file, text.format(**values, seed=seed))
    trained = ["model", "judge"] if job.kind == "turns" else ["model"]
    for file, text in (_many_texts() if job.kind == "many" else _optimizer(trained, job)).items():
        _write(pymodules / file, text)
    for file, text in _FEATURES.get(f"{job.kind}{WITH if job.has_feature else ''}", {}).items():
        _write(pymodules / file, text)
    for file, content in _settings(job).items():
        _write(pymodules.parent / "settings" / f"{file}.json", json.dumps(content))


def _many_texts() -> dict[str, str]:
    parts = {"trunks": ["trunk_a", "trunk_b"], "head_a": ["head_a"], "head_b": ["head_b"]}
    texts = {f"modules/{name}.py": _MANY_MODULE.format(name=name) for names in parts.values() for name in names}
    texts |= {f"module_transforms/{name}.py": _MANY_TRANSFORM.format(name=name) for name in DATASETS}
    for name, modules in parts.items():
        text = _OPTIMIZER.format(modules=modules, scheduler="BaseScheduler")
        texts[f"optim_sched/{name}.py"] = text
    return texts


def _optimizer(modules: list[str], job: Job) -> dict[str, str]:
    scheduler = "StepMarker" if job.marks_steps else "BaseScheduler"
    return {"optim_sched/main.py": _OPTIMIZER.format(modules=modules, scheduler=scheduler)}


def _settings(job: Job) -> dict[str, Any]:
    kind = KINDS[job.kind]
    num_batches = kind.world_size * kind.batches_per_step if kind.is_shared_out else len(DATASETS)
    names = [name for registers in REGISTERS.values() for name in registers]
    metrics = [{"name": name, "optimize": False, "direction": "max"} for name in names if name.startswith("accuracy")]
    many = [*dict.fromkeys(name for name in names if name.startswith("loss")), *(one for one in metrics[::2])]
    training: dict[str, Any] = {"gradient_reduction": "exact" if job.name == "exact" else "fast"}
    registers = many if job.kind == "many" else ["d_loss", "g_loss"] if job.kind == "turns" else ["loss_entropy"]
    if job.kind == "turns" and job.has_feature:
        training |= {"turns": [["judge"], ["main"]], "share_batches": True}
    if job.checkpoint_every:
        training["checkpoint_every_steps"] = job.checkpoint_every
    return {
        "data_loading": {"step_min_items": kind.batch_size * num_batches},
        "logging": {"progress_bar": {"enabled": True}},
        "loss_registers": {"loss_registers": registers},
        "training": training,
    }


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.lstrip())
