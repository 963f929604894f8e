"""A GAN by hand with DDP: both networks in one update, or in turn on the same batch as the original DCGAN."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

from benchmarks.turns import Job, Turn
from benchmarks.work import KINDS, NUM_CLASSES, Points, make_judge, make_model

Batch = dict[str, torch.Tensor]


def main(job: Job) -> None:
    kind, turn = KINDS[job.kind], Turn(job)
    dist.init_process_group("gloo")
    points = Points(kind)
    subset = Subset(points, points.get_split_idxs("train"))
    sampler: DistributedSampler[object] = DistributedSampler(subset)
    loader = DataLoader(subset, kind.batch_size, sampler=sampler)
    model, judge = (DistributedDataParallel(make(kind)) for make in (make_model, make_judge))
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True) for module in (judge, model)]
    for epoch in range(job.num_epochs):
        turn.wait()
        sampler.set_epoch(epoch)
        for step, batch in enumerate(loader, 1):
            loss = (take_turns if job.has_feature else play_at_once)(batch, model, judge, optimizers)
            if step % 50 == 0 and dist.get_rank() == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
        turn.done()
    dist.destroy_process_group()


def play_at_once(
    batch: Batch,
    model: DistributedDataParallel,
    judge: DistributedDataParallel,
    optimizers: list[torch.optim.Optimizer],
) -> torch.Tensor:
    real = F.one_hot(batch["y"], NUM_CLASSES).float()
    of_real, of_drawn = judge(torch.cat([real, model(batch["x"])]))[:, 0].chunk(2)
    loss = (F.softplus(-of_real) + F.softplus(of_drawn) + F.softplus(-of_drawn)).mean()
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss


def take_turns(
    batch: Batch,
    model: DistributedDataParallel,
    judge: DistributedDataParallel,
    optimizers: list[torch.optim.Optimizer],
) -> torch.Tensor:
    """Train the judge, then the model against the updated judge."""
    real = F.one_hot(batch["y"], NUM_CLASSES).float()
    of_judge, of_model = optimizers
    with torch.no_grad():
        drawn = model.module(batch["x"])
    of_real, of_drawn = judge(torch.cat([real, drawn]))[:, 0].chunk(2)
    of_judge.zero_grad()
    (F.softplus(-of_real) + F.softplus(of_drawn)).mean().backward()
    of_judge.step()
    judge.requires_grad_(False)
    loss = F.softplus(-judge.module(model(batch["x"]))[:, 0]).mean()
    of_model.zero_grad()
    loss.backward()
    of_model.step()
    judge.requires_grad_(True)
    return loss


if __name__ == "__main__":
    main(Job.from_environment())
