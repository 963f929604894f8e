"""Sums over real processes: in many small buckets, compared with those of one process alone, and torch's own.

Run by torchrun; ends with an error if a single bit differs on any rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from pipeline.distributed.processes import Processes
from pipeline.training.engines import reduction as sums
from pipeline.training.step_plan import share_of
from pipeline.worker import exit_now

_SHAPES = ((), (3,), (7, 5), (40, 2), (1,), (4, 3, 3, 3), (200,))
_TYPES = (torch.float64, torch.int64, torch.uint8)
_NUM_BATCHES = (*range(1, 10), 16, 21)


def tensors_of(batch: int) -> sums.Tensors:
    """Return what a batch has: numbers of any sign and size, and for every tensor some batches without it."""
    generator = torch.Generator().manual_seed(batch)
    drawn = [torch.randn(shape, generator=generator) for shape in _SHAPES]
    # Many are zeros of either sign.
    found = [tensor * (tensor > 0.5) * 10.0 ** (batch % 5) for tensor in drawn]
    found[5] = found[5].to(memory_format=torch.channels_last)
    return [None if (batch + index) % 4 == 0 else tensor for index, tensor in enumerate(found)]


def total(num_batches: int, processes: Processes) -> sums.Tensors:
    tree = sums.TreeSums([one.to(torch.float32) for one in map(torch.empty, _SHAPES)], processes)
    tree.begin(num_batches)
    for batch in share_of(num_batches, processes.rank, processes.world_size):
        tree.add(tensors_of(batch))
    return tree.total()


def check_plain_sums(processes: Processes) -> None:
    """Whatever way a sum goes: little or much, of one number, of any type, in another memory order."""
    generator = torch.Generator().manual_seed(processes.rank)
    drawn = [torch.randn(shape, generator=generator) * 100 for shape in ((), (5,), (4, 3, 3, 3), (400_000,))]
    drawn += [drawn[2].to(memory_format=torch.channels_last), *(drawn[1].to(one) for one in _TYPES)]
    for index, tensor in enumerate(drawn):
        by_torch, ours = tensor.clone(), processes.sum(tensor)
        dist.all_reduce(by_torch)
        assert ours is tensor
        assert torch.equal(ours, by_torch), f"sum {index} on rank {processes.rank}"


def main() -> None:
    # Fewer elements than some tensors have, and a number that no number of processes divides.
    sums._BUCKET_BYTES = 148
    processes = Processes.join()
    for num_batches in _NUM_BATCHES:
        pairs = zip(total(num_batches, Processes()), total(num_batches, processes), strict=True)
        for index, (alone, together) in enumerate(pairs):
            if alone is not None:
                assert together is not None
                same = torch.equal(alone.view(-1).view(torch.int32), together.reshape(-1).view(torch.int32))
                assert same, f"tensor {index} of {num_batches} batches on rank {processes.rank}"
    check_plain_sums(processes)
    processes.barrier()
    exit_now(0)


if __name__ == "__main__":
    main()
