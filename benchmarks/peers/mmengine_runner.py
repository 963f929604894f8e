"""The same work under MMEngine's Runner, with its default hooks."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mmengine.evaluator import BaseMetric, Evaluator
from mmengine.hooks import CheckpointHook, Hook
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch.utils.data import Subset

from benchmarks.turns import Job, Turn
from benchmarks.work import KINDS, Kind, Points, make_model


class Classifier(BaseModel):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.model = make_model(kind)

    def forward(self, x: torch.Tensor, y: torch.Tensor, mode: str = "tensor") -> Any:
        logits = self.model(x)
        if mode == "loss":
            return {"loss": F.cross_entropy(logits, y)}
        return (logits, y) if mode == "predict" else logits


class MeanLoss(BaseMetric):
    def process(self, data_batch: Any, data_samples: Any) -> None:
        logits, labels = data_samples
        self.results.append((F.cross_entropy(logits, labels, reduction="sum").item(), len(labels)))

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        sums, sizes = zip(*results, strict=True)
        return {"val_loss": sum(sums) / sum(sizes)}


class TakesTurns(Hook):
    # Last before the batches, but before the checkpoints after them.
    priority = "LOW"

    def __init__(self, job: Job, turn: Turn) -> None:
        self._turn, self._epochs_left = turn, job.num_epochs

    def before_train_epoch(self, runner: Runner) -> None:
        self._turn.wait()

    def after_train_epoch(self, runner: Runner) -> None:
        self._turn.done()
        self._epochs_left -= 1
        runner.train_loop.stop_training = not self._epochs_left


class MarksSteps(Hook):
    priority = "LOW"

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def after_train_iter(self, runner: Runner, *_: Any, **__: Any) -> None:
        self._turn.step()


def make_checkpoint_hook(job: Job) -> CheckpointHook | None:
    if job.checkpoint_every:
        return CheckpointHook(job.checkpoint_every, by_epoch=False, max_keep_ckpts=1, save_last=False)
    if job.pool_period:
        return CheckpointHook(1, max_keep_ckpts=1, save_best="val_loss", rule="less")
    return None


def make_custom_hooks(job: Job) -> list[Hook]:
    turn = Turn(job)
    hooks: list[Hook] = [TakesTurns(job, turn)]
    if job.marks_steps:
        hooks.append(MarksSteps(turn))
    if job.pool_period:
        hooks.append(CheckpointHook(job.pool_period, filename_tmpl="kept_{}.pth", save_last=False))
    return hooks


def make_loader(points: Points, kind: Kind, split: str) -> dict[str, Any]:
    return {
        "dataset": Subset(points, points.get_split_idxs(split)),
        "batch_size": kind.batch_size,
        "sampler": {"type": "DefaultSampler", "shuffle": split == "train"},
        "collate_fn": {"type": "default_collate"},
        "num_workers": kind.num_workers,
        "persistent_workers": bool(kind.num_workers),
    }


def make_validation(points: Points, kind: Kind) -> dict[str, Any]:
    return {"val_dataloader": make_loader(points, kind, "val"), "val_cfg": {}, "val_evaluator": Evaluator(MeanLoss())}


def main(job: Job) -> None:
    kind = KINDS[job.kind]
    points = Points(kind)
    if kind.world_size > 1:
        # The Runner would ask for the CUDA device of this process; it leaves a group that is there alone.
        dist.init_process_group("gloo")
    if job.resumes:
        # MMEngine saves its message hub's objects, which torch.load has refused by default since 2.6.
        os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    runner = Runner(
        model=Classifier(kind),
        work_dir=str(job.saved),
        train_dataloader=make_loader(points, kind, "train"),
        # Resumed epochs come on top of those of the earlier life; TakesTurns stops after its own.
        train_cfg={"by_epoch": True, "max_epochs": job.num_epochs * (2 if job.resumes else 1)},
        optim_wrapper={"optimizer": {"type": "AdamW", "lr": 1e-3}},
        default_hooks={"checkpoint": make_checkpoint_hook(job)},
        custom_hooks=make_custom_hooks(job),
        launcher="pytorch" if kind.world_size > 1 else "none",
        resume=job.resumes,
        # DDP takes no device for a model on CPU.
        cfg={"model_wrapper_cfg": {"type": "MMDistributedDataParallel", "device_ids": None}},
        **(make_validation(points, kind) if job.pool_period else {}),
    )
    runner.train()


if __name__ == "__main__":
    main(Job.from_environment())
