"""The same work as a LightningModule, with Lightning's default logger and progress bar."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Subset

from benchmarks.turns import Job, Turn
from benchmarks.work import KINDS, Kind, Points, make_model


class Classifier(LightningModule):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.model = make_model(kind)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.model(batch["x"]), batch["y"])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        loss = F.cross_entropy(self.model(batch["x"]), batch["y"])
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class TakesTurns(Callback):
    def __init__(self, job: Job, turn: Turn) -> None:
        self._turn, self._validates = turn, bool(job.pool_period)
        self._epochs_left = job.num_epochs

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The first epoch after resuming from inside an epoch has no on_train_epoch_start.
        self._turn.wait()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._turn.wait()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # An epoch's validation is part of its training epoch: on_train_epoch_end would be too late.
        if not trainer.sanity_checking:
            self._turn.done()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._validates:
            self._turn.done()
        self._epochs_left -= 1
        trainer.should_stop = not self._epochs_left


class MarksSteps(Callback):
    """Comes before the checkpoints, because Lightning moves those behind all other callbacks."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._turn.step()


def make_checkpoints(job: Job) -> list[Callback]:
    if job.checkpoint_every:
        return [ModelCheckpoint(job.saved, every_n_train_steps=job.checkpoint_every, save_top_k=1)]
    if job.pool_period:
        best = ModelCheckpoint(job.saved, "best-{epoch}", monitor="val_loss", mode="min", save_top_k=1)
        period: Any = {"every_n_epochs": job.pool_period, "save_top_k": -1}
        if job.pool_period == 1:
            return [best, ModelCheckpoint(job.saved, "kept-{epoch}", save_last=True, **period)]
        # save_last acts only when its callback saves, which here is not after every epoch.
        return [
            best,
            ModelCheckpoint(job.saved, "last-{epoch}", save_top_k=1),
            ModelCheckpoint(job.saved, "kept-{epoch}", **period),
        ]
    return []


def make_trainer(job: Job, kind: Kind) -> Trainer:
    turn, checkpoints = Turn(job), make_checkpoints(job)
    return Trainer(
        accelerator="cpu",
        devices=kind.world_size,
        strategy="ddp" if kind.world_size > 1 else "auto",
        # Resumed epochs come on top of those of the earlier life; TakesTurns stops after its own.
        max_epochs=job.num_epochs * (2 if job.resumes else 1),
        default_root_dir=job.saved,
        enable_checkpointing=bool(checkpoints),
        callbacks=[TakesTurns(job, turn), *([MarksSteps(turn)] if job.marks_steps else []), *checkpoints],
    )


def main(job: Job) -> None:
    kind = KINDS[job.kind]
    points = Points(kind)
    workers: dict[str, Any] = {"num_workers": kind.num_workers, "persistent_workers": bool(kind.num_workers)}
    # Lightning gives them a DistributedSampler each.
    train = DataLoader(Subset(points, points.get_split_idxs("train")), kind.batch_size, shuffle=True, **workers)
    val = DataLoader(Subset(points, points.get_split_idxs("val")), kind.batch_size, **workers)
    # The one a run has resumed from is never removed, so there may be an older one.
    checkpoint = max(job.saved.glob("*.ckpt"), key=os.path.getmtime) if job.resumes else None
    trainer = make_trainer(job, kind)
    trainer.fit(Classifier(kind), train, val if job.pool_period else None, ckpt_path=checkpoint)


if __name__ == "__main__":
    main(Job.from_environment())
