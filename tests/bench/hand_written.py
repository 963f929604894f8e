"""What a careful engineer writes without us: a minimal DDP loop."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from tests.bench.turns import Turn
from tests.bench.work import BATCH_SIZE, Points, make_model, num_points


def main(kind: str, num_epochs: int) -> None:
    dist.init_process_group("gloo")
    dataset = Points(num_points(kind))
    sampler: DistributedSampler[object] = DistributedSampler(dataset)
    loader = DataLoader(dataset, BATCH_SIZE, sampler=sampler)
    model = DistributedDataParallel(make_model(kind))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    turn = Turn()
    for epoch in range(num_epochs):
        turn.wait()
        sampler.set_epoch(epoch)
        for step, batch in enumerate(loader, 1):
            loss = F.cross_entropy(model(batch["x"]), batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 50 == 0 and dist.get_rank() == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
        turn.done()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
