"""A DDP loop with a fused optimizer, and by hand what some features of ours do."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

from benchmarks.turns import Job, Turn
from benchmarks.work import IGNORED, KINDS, NUM_CLASSES, Points, make_model, mask_labels

Batch = dict[str, torch.Tensor]


def main(job: Job) -> None:
    kind, turn = KINDS[job.kind], Turn(job)
    dist.init_process_group("gloo")
    points = Points(kind)
    train = Subset(points, points.get_split_idxs("train"))
    sampler: DistributedSampler[object] = DistributedSampler(train)
    loader = DataLoader(train, kind.batch_size, sampler=sampler)
    model = make_model(kind)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    average = [weight.detach().clone() for weight in model.parameters()]
    for epoch in range(job.num_epochs):
        if job.kind != "metrics":
            turn.wait()
        sampler.set_epoch(epoch)
        for step, batch in enumerate(loader, 1):
            if job.kind != "tokens":
                loss = mean_over_points(parallel, batch)
            else:
                loss = (
                    mean_over_counted_tokens(parallel, batch) if job.has_feature else mean_over_tokens(parallel, batch)
                )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if job.kind == "average" and job.has_feature:
                decay = min(0.999, (1 + step) / (10 + step))
                with torch.no_grad():
                    torch._foreach_lerp_(average, list(model.parameters()), 1 - decay)
            if step % 50 == 0 and dist.get_rank() == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
        if job.kind == "metrics":
            turn.wait()
            evaluate(job, model, points)
        turn.done()
    dist.destroy_process_group()


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
