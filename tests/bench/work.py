"""The work both contenders do: the same data, the same model, the same optimizer, the same number of steps."""

from __future__ import annotations

import torch
from torch import nn

from pipeline.components import BaseDataset

NUM_POINTS = 32 * 2 * 200
BATCH_SIZE = 32
SIZES = {"tiny": (64, 64, 1), "compute": (64, 2560, 3)}


def make_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    size, hidden, depth = SIZES[kind]
    layers: list[nn.Module] = [nn.Linear(size, hidden), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(hidden, hidden), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, 10))


class Points(BaseDataset):
    """Random points in memory."""

    def __init__(self, num_points: int = NUM_POINTS) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(num_points, 64, generator=generator)
        self.labels = torch.randint(10, (num_points,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        return {"x": self.inputs[idx], "y": self.labels[idx]}

    def get_split_idxs(self, split: str) -> range:
        return range(len(self.labels)) if split == "train" else range(BATCH_SIZE)
