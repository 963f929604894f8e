"""A DDP loop with a fused optimizer, and by hand what some features of ours do."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

from benchmarks.turns import Job, Turn
from benchmarks.work import IGNORED, KINDS, NUM_CLASSES, Points, contrast, make_model, mask_labels

Batch = dict[str, torch.Tensor]


def main(job: Job) -> None:
    kind, turn = KINDS[job.kind], Turn(job)
    dist.init_process_group("gloo")
    points = Points(kind)
    subset = Subset(points, points.get_split_idxs("train"))
    sampler: DistributedSampler[object] = DistributedSampler(subset)
    loader = DataLoader(subset, kind.batch_size, sampler=sampler)
    model = make_model(kind)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    average = [weight.detach().clone() for weight in model.parameters()]
    for epoch in range(job.num_epochs):
        if job.kind != "metrics":
            turn.wait()
        sampler.set_epoch(epoch)
        if job.kind == "rows":
            train_rows(job, parallel, optimizer, list(loader))
        else:
            train(job, epoch, parallel, optimizer, loader, average)
        if job.kind == "metrics":
            turn.wait()
            evaluate(job, model, points)
        turn.done()
    dist.destroy_process_group()


def train(
    job: Job,
    epoch: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Batch],
    average: list[torch.Tensor],
) -> None:
    weights = list(model.parameters())
    for step, batch in enumerate(loader, 1):
        if job.kind != "tokens":
            loss = mean_over_points(model, batch)
        else:
            loss = mean_over_counted_tokens(model, batch) if job.has_feature else mean_over_tokens(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if job.kind == "average" and job.has_feature:
            decay = min(0.999, (1 + step) / (10 + step))
            with torch.no_grad():
                torch._foreach_lerp_(average, weights, 1 - decay)
        if step % 50 == 0 and dist.get_rank() == 0:
            print(f"epoch {epoch} step {step} loss {loss.item():.4f}")


def train_rows(
    job: Job, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, batches: list[Batch]
) -> None:
    size = KINDS[job.kind].batches_per_step
    for start in range(0, len(batches), size):
        optimizer.zero_grad()
        (couple if job.has_feature else accumulate)(model, batches[start : start + size])
        optimizer.step()


def mean_over_points(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def mean_over_tokens(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Average over all points, the ignored ones included, as a loop does that does not care."""
    return F.cross_entropy(model(batch["x"]), mask_labels(batch["y"]), ignore_index=IGNORED, reduction="none").mean()


def mean_over_counted_tokens(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Average over the points that count on all ranks; DDP divides gradients by their number."""
    targets = mask_labels(batch["y"])
    count = (targets != IGNORED).sum()
    dist.all_reduce(count)
    total = F.cross_entropy(model(batch["x"]), targets, ignore_index=IGNORED, reduction="sum")
    return total * dist.get_world_size() / count


def accumulate(model: DistributedDataParallel, batches: list[Batch]) -> None:
    """Let each batch compare its own rows alone."""
    for batch in batches:
        with nullcontext() if batch is batches[-1] else model.no_sync():
            (contrast(model(batch["x"]), batch["y"]).mean() / len(batches)).backward()


def couple(model: DistributedDataParallel, batches: list[Batch]) -> None:
    """Compare the rows of all batches of all ranks, holding the graph of one batch (GradCache)."""
    with torch.no_grad():
        own = torch.cat([model.module(batch["x"]) for batch in batches])
    columns = []
    for column in (own, torch.cat([batch["y"] for batch in batches])):
        gathered = [torch.empty_like(column) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, column)
        columns.append(torch.cat(gathered))
    rows = columns[0].requires_grad_()
    contrast(rows, columns[1]).mean().backward()
    assert rows.grad is not None
    # DDP divides gradients by the number of ranks.
    gradients = (rows.grad * dist.get_world_size()).split(len(own))[dist.get_rank()].split(len(batches[0]["x"]))
    for batch, gradient in zip(batches, gradients, strict=True):
        with nullcontext() if batch is batches[-1] else model.no_sync():
            model(batch["x"]).backward(gradient)


@torch.no_grad()
def evaluate(job: Job, model: torch.nn.Module, points: Points) -> None:
    """Evaluate a share of the validation points, and add what the ranks have."""
    kind = KINDS[job.kind]
    own = list(points.get_split_idxs("val"))[dist.get_rank() :: dist.get_world_size()]
    model.eval()
    total = torch.zeros((), dtype=torch.float64)
    matrices = [torch.zeros(NUM_CLASSES**2, dtype=torch.int64) for _ in range(2)]
    scores_of_first = []
    for batch in DataLoader(Subset(points, own), kind.batch_size):
        scores = model(batch["x"])
        total += F.cross_entropy(scores, batch["y"], reduction="sum")
        if job.has_feature:
            for matrix in matrices:
                matrix += torch.bincount(batch["y"] * NUM_CLASSES + scores.argmax(1), minlength=NUM_CLASSES**2)
            scores_of_first.append((scores[:, 0], batch["y"] == 0))
    dist.all_reduce(total)
    if job.has_feature:
        for matrix in matrices:
            dist.all_reduce(matrix)
        everything: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(everything, [torch.cat(column) for column in zip(*scores_of_first, strict=True)])
        print([conclude(matrix.view(NUM_CLASSES, -1).double()) for matrix in matrices], auroc(everything))
    model.train()


def conclude(matrix: torch.Tensor) -> float:
    both = matrix.diagonal()
    return float((2 * both / (matrix.sum(0) + matrix.sum(1)).clamp(min=1)).mean())


def auroc(columns: list[object]) -> float:
    scores, is_first = (torch.cat(column) for column in zip(*columns, strict=True))  # type: ignore[call-overload]
    ranks = scores.argsort().argsort().double() + 1
    num = int(is_first.sum())
    return float((ranks[is_first].sum() - num * (num + 1) / 2) / max(1, num * (len(scores) - num)))


if __name__ == "__main__":
    main(Job.from_environment())
