"""The same work as an Ignite engine, with a line every 50 steps as in its quickstart."""

from __future__ import annotations

import os
from typing import Any

import ignite.distributed as idist
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver, global_step_from_engine
from ignite.metrics import Loss
from torch.utils.data import DataLoader, DistributedSampler, Subset

from benchmarks.turns import Job, Turn
from benchmarks.work import KINDS, Kind, Points, make_model


def prepare_batch(batch: dict[str, torch.Tensor], *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return batch["x"], batch["y"]


def make_loader(points: Points, kind: Kind, split: str) -> DataLoader[Any]:
    # auto_dataloader divides both by the number of processes.
    workers = {"num_workers": kind.num_workers * kind.world_size, "persistent_workers": bool(kind.num_workers)}
    subset, batch_size = Subset(points, points.get_split_idxs(split)), kind.batch_size * kind.world_size
    return idist.auto_dataloader(subset, batch_size=batch_size, shuffle=split == "train", **workers)


def add_turns(trainer: Engine, job: Job, sampler: object) -> None:
    turn = Turn(job)

    @trainer.on(Events.EPOCH_STARTED)
    def begin(engine: Engine) -> None:
        turn.wait()
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(engine.state.epoch - 1)

    trainer.add_event_handler(Events.EPOCH_COMPLETED, turn.done)
    if job.marks_steps:
        trainer.add_event_handler(Events.ITERATION_COMPLETED, turn.step)


def add_log(trainer: Engine) -> None:
    @trainer.on(Events.ITERATION_COMPLETED(every=50))
    @idist.one_rank_only()
    def log(engine: Engine) -> None:
        print(f"Epoch[{engine.state.epoch}], Iter[{engine.state.iteration}] Loss: {engine.state.output:.4f}")


def add_pools(trainer: Engine, job: Job, val: DataLoader[Any], to_save: dict[str, Any]) -> None:
    """Evaluate after each epoch, and keep the best, the last and every second epoch."""
    loss = Loss(F.cross_entropy)
    evaluator = create_supervised_evaluator(
        to_save["model"], {"loss": loss}, idist.device(), prepare_batch=prepare_batch
    )
    saver = DiskSaver(job.saved, require_empty=False)
    best = Checkpoint(
        to_save,
        saver,
        filename_prefix="best",
        score_function=Checkpoint.get_default_score_fn("loss", -1.0),
        score_name="val_loss",
        n_saved=1,
        global_step_transform=global_step_from_engine(trainer),
    )
    evaluator.add_event_handler(Events.COMPLETED, best)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(val))
    last = Checkpoint(to_save, saver, filename_prefix="last", n_saved=1)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, last)
    kept = Checkpoint(to_save, saver, filename_prefix="kept", n_saved=None)
    trainer.add_event_handler(Events.EPOCH_COMPLETED(every=job.pool_period), kept)


def train(local_rank: int, job: Job) -> None:
    kind = KINDS[job.kind]
    points = Points(kind)
    loader = make_loader(points, kind, "train")
    model = idist.auto_model(make_model(kind))
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=1e-3))
    trainer = create_supervised_trainer(model, optimizer, F.cross_entropy, idist.device(), prepare_batch=prepare_batch)
    to_save = {"model": model, "optimizer": optimizer, "trainer": trainer}
    # Handlers run in the order they are added: turns come before checkpoints.
    add_turns(trainer, job, loader.sampler)
    add_log(trainer)
    if job.checkpoint_every:
        checkpoint = Checkpoint(to_save, DiskSaver(job.saved, require_empty=False), n_saved=1)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=job.checkpoint_every), checkpoint)
    if job.pool_period:
        add_pools(trainer, job, make_loader(points, kind, "val"), to_save)
    if job.resumes:
        # A new handler does not know what the earlier life has saved, so there may be an older one.
        Checkpoint.load_objects(to_save, max(job.saved.glob("checkpoint_*.pt"), key=os.path.getmtime))
    trainer.run(loader, max_epochs=trainer.state.epoch + job.num_epochs)


if __name__ == "__main__":
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(train, Job.from_environment())
