"""What a careful engineer writes for eight datasets, four modules, three optimizers and twelve recorded values."""

from __future__ import annotations

import contextlib
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

from benchmarks.turns import Job, Turn
from benchmarks.work import DATASETS, KINDS, Points, make_parts, task_losses

_LOG_EVERY = 50


class Tasks(nn.Module):
    """All modules in one, so that one engine reduces their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(make_parts())

    def forward(self, dataset: str, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return task_losses(dataset, batch, dict(self.parts.items()))


def main(job: Job) -> None:
    kind, turn = KINDS[job.kind], Turn(job)
    dist.init_process_group("gloo")
    share = len(DATASETS) // kind.world_size
    own = DATASETS[dist.get_rank() * share :][:share]
    loaders = {name: _loader(name, kind.batch_size) for name in own}
    tasks = Tasks()
    parallel = DistributedDataParallel(tasks, find_unused_parameters=True)
    trunks = [*tasks.parts["trunk_a"].parameters(), *tasks.parts["trunk_b"].parameters()]
    groups = [trunks, tasks.parts["head_a"].parameters(), tasks.parts["head_b"].parameters()]
    optimizers = [torch.optim.AdamW(group, lr=1e-3) for group in groups]
    for epoch in range(job.num_epochs):
        turn.wait()
        seen: dict[str, list[torch.Tensor]] = defaultdict(list)
        for step, batches in enumerate(zip(*loaders.values(), strict=True), 1):
            for dataset, batch in zip(own, batches, strict=True):
                is_last = dataset == own[-1]
                with contextlib.nullcontext() if is_last else parallel.no_sync():
                    losses = parallel(dataset, batch)
                    # DDP averages over the ranks; the step's loss is the mean over all items of all datasets.
                    (losses[f"loss_{dataset}"].mean() / share).backward()
                for register, loss in losses.items():
                    seen[register].append(loss.detach().sum())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if step % _LOG_EVERY == 0 and dist.get_rank() == 0:
                shown = {name: torch.stack(sums[-_LOG_EVERY:]).mean().item() for name, sums in seen.items()}
                print(f"epoch {epoch} step {step} {shown}")
        turn.done()
    dist.destroy_process_group()


def _loader(dataset: str, batch_size: int) -> DataLoader[object]:
    points = Points(KINDS["many"], seed=DATASETS.index(dataset))
    return DataLoader(Subset(points, points.get_split_idxs("train")), batch_size, shuffle=True)


if __name__ == "__main__":
    main(Job.from_environment())
