"""What a careful engineer writes without us: a minimal DDP loop."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

from benchmarks.turns import FUSED, Job, Turn
from benchmarks.work import KINDS, Points, make_model


def main(job: Job) -> None:
    kind, turn = KINDS[job.kind], Turn(job)
    dist.init_process_group("gloo")
    points = Points(kind)
    train = Subset(points, points.get_split_idxs("train"))
    sampler: DistributedSampler[object] = DistributedSampler(train)
    workers = {"num_workers": kind.num_workers, "persistent_workers": True} if kind.num_workers else {}
    loader = DataLoader(train, kind.batch_size, sampler=sampler, **workers)  # type: ignore[arg-type]
    model = make_model(kind)
    parallel = DistributedDataParallel(model) if kind.world_size > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=job.name == FUSED or None)
    if job.resumes:
        load(job, model, optimizer)
    for epoch in range(job.num_epochs):
        turn.wait()
        sampler.set_epoch(epoch)
        for step, batch in enumerate(loader, 1):
            loss = F.cross_entropy(parallel(batch["x"]), batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 50 == 0 and dist.get_rank() == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
            if job.marks_steps:
                turn.step()
            if job.checkpoint_every and step % job.checkpoint_every == 0 and dist.get_rank() == 0:
                save(job, model, optimizer)
        turn.done()
    dist.destroy_process_group()


def save(job: Job, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save, sync, and only then replace what was there: the least that survives a crash."""
    job.saved.mkdir(exist_ok=True)
    with (job.saved / "new.pt").open("wb") as file:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    (job.saved / "new.pt").replace(job.saved / "last.pt")


def load(job: Job, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = torch.load(job.saved / "last.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


if __name__ == "__main__":
    main(Job.from_environment())
