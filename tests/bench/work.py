"""The work all contenders do: the same data, the same model, the same optimizer, the same number of steps."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from pipeline.components import BaseDataset

BATCH_SIZE = 32
WORLD_SIZE = 2
KINDS = {
    "tiny": {"hidden": 64, "depth": 1, "steps": 300},
    "compute": {"hidden": 2560, "depth": 3, "steps": 20},
    "convolutions": {"hidden": 64, "depth": 4, "steps": 20},
}


def num_points(kind: str) -> int:
    return BATCH_SIZE * WORLD_SIZE * KINDS[kind]["steps"]


def make_model(kind: str) -> nn.Module:
    """Return 64 → hidden → … → 10: of layers that have much to learn, or of convolutions that have much to do."""
    hidden, depth = KINDS[kind]["hidden"], KINDS[kind]["depth"]
    if kind == "convolutions":
        sizes = [1, *[hidden] * depth]
        convolutions = [(nn.Conv2d(*pair, 3, padding=1), nn.ReLU()) for pair in itertools.pairwise(sizes)]
        inner = [layer for pair in convolutions for layer in pair]
        return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *inner, nn.Flatten(), nn.Linear(64 * hidden, 10))
    layers: list[nn.Module] = [nn.Linear(64, hidden), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(hidden, hidden), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, 10))


class Points(BaseDataset):
    """Random points in memory."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(size, 64, generator=generator)
        self.labels = torch.randint(10, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        return {"x": self.inputs[idx], "y": self.labels[idx]}

    def get_split_idxs(self, split: str) -> range:
        return range(len(self.labels)) if split == "train" else range(BATCH_SIZE)
