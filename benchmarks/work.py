"""The work all contenders do: the same data, the same model, the same optimizer, the same number of steps."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from pipeline.components import BaseDataset

NUM_INPUTS, NUM_CLASSES = 64, 10
IGNORED = -100
# Labels below are ignored where tokens are counted.
FIRST_COUNTED = 3


@dataclass(frozen=True)
class Kind:
    """How large the model is, how long an epoch, and what a point costs to load."""

    hidden: int
    depth: int
    steps: int
    world_size: int = 2
    batch_size: int = 32
    num_workers: int = 0
    # So many points are averaged to make one: the work of a decoder or an augmentation.
    num_mixed: int = 0
    num_val_points: int = 64
    has_convolutions: bool = False
    # Whether every process has a batch of the same data in a step.
    is_shared_out: bool = True
    # How many batches every process has in a step.
    batches_per_step: int = 1

    @property
    def num_points(self) -> int:
        return self.batch_size * self.batches_per_step * self.steps * (self.world_size if self.is_shared_out else 1)


KINDS = {
    "tiny": Kind(hidden=64, depth=1, steps=300),
    "compute": Kind(hidden=2560, depth=3, steps=20),
    "convolutions": Kind(hidden=64, depth=4, steps=20, has_convolutions=True),
    # With and without a feature, see features.py.
    "tokens": Kind(hidden=64, depth=1, steps=300),
    "turns": Kind(hidden=512, depth=2, steps=60),
    "average": Kind(hidden=64, depth=4, steps=20, has_convolutions=True),
    "metrics": Kind(hidden=64, depth=1, steps=2, num_val_points=4096),
    "rows": Kind(hidden=64, depth=4, steps=5, has_convolutions=True, batches_per_step=4),
    "loading": Kind(hidden=64, depth=1, steps=100, num_workers=2, num_mixed=48),
    "pools": Kind(hidden=1024, depth=4, steps=4),
    # Each of eight datasets has a batch in every step.
    "many": Kind(hidden=64, depth=1, steps=100, is_shared_out=False),
    # 1.2 GB of weights and AdamW's moments.
    "large": Kind(hidden=3200, depth=11, steps=10, world_size=1),
}


def make_model(kind: Kind) -> nn.Module:
    """Return 64 → hidden → … → 10: of layers that have much to learn, or of convolutions that have much to do."""
    hidden, depth = kind.hidden, kind.depth
    if kind.has_convolutions:
        sizes = [1, *[hidden] * depth]
        convolutions = [(nn.Conv2d(*pair, 3, padding=1), nn.ReLU()) for pair in itertools.pairwise(sizes)]
        inner = [layer for pair in convolutions for layer in pair]
        return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *inner, nn.Flatten(), nn.Linear(64 * hidden, NUM_CLASSES))
    layers: list[nn.Module] = [nn.Linear(NUM_INPUTS, hidden), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(hidden, hidden), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, NUM_CLASSES))


def make_judge(kind: Kind) -> nn.Module:
    """Return the other network of a game: it scores what the model draws."""
    return nn.Sequential(nn.Linear(NUM_CLASSES, kind.hidden), nn.ReLU(), nn.Linear(kind.hidden, 1))


def mask_labels(labels: torch.Tensor) -> torch.Tensor:
    """Return targets of which some are to be ignored."""
    return labels.masked_fill(labels < FIRST_COUNTED, IGNORED)


def contrast(rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return, for each row, how badly it tells the rows with its label from the others."""
    rows = F.normalize(rows, dim=1)
    is_self = torch.eye(len(rows), dtype=torch.bool)
    scores = (10 * rows @ rows.T).masked_fill(is_self, -1e4)
    wanted = ((labels == labels[:, None]) & ~is_self).float()
    return F.cross_entropy(scores, wanted / wanted.sum(dim=1, keepdim=True).clamp(min=1), reduction="none")


DATASETS = [f"d{number}" for number in range(8)]
# Twelve: a loss for each dataset, and an accuracy for each pair of them.
REGISTERS = {name: [f"loss_{name}", f"accuracy_{number // 2}"] for number, name in enumerate(DATASETS)}


def make_parts() -> dict[str, nn.Module]:
    """Return two trunks and two heads; every dataset uses one of each."""
    hidden = KINDS["many"].hidden
    trunks = {f"trunk_{one}": nn.Sequential(nn.Linear(NUM_INPUTS, hidden), nn.ReLU()) for one in "ab"}
    return {**trunks, **{f"head_{one}": nn.Linear(hidden, NUM_CLASSES) for one in "ab"}}


def task_losses(
    dataset: str, batch: dict[str, torch.Tensor], modules: Mapping[str, nn.Module]
) -> dict[str, torch.Tensor]:
    """Return a loss and a metric of one dataset, one value per item."""
    number = DATASETS.index(dataset)
    trunk, head = modules["trunk_a" if number < 4 else "trunk_b"], modules["head_b" if number % 2 else "head_a"]
    scores = head(trunk(batch["x"]))
    loss, accuracy = REGISTERS[dataset]
    return {
        loss: F.cross_entropy(scores, batch["y"], reduction="none"),
        accuracy: (scores.detach().argmax(1) == batch["y"]).float(),
    }


class Points(BaseDataset):
    """Random points in memory, of which the last are there to be validated on."""

    def __init__(self, kind: Kind, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = kind.num_points + kind.num_val_points
        self.inputs = torch.randn(size, NUM_INPUTS, generator=generator)
        self.labels = torch.randint(NUM_CLASSES, (size,), generator=generator)
        self._num_mixed, self._num_train = kind.num_mixed, kind.num_points
        self._array = self.inputs.numpy()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        if not self._num_mixed:
            return {"x": self.inputs[idx], "y": self.labels[idx]}
        mixed = self._array[idx]
        for other in range(self._num_mixed):
            mixed = mixed + np.tanh(self._array[(idx + other) % len(self._array)])
        return {"x": torch.from_numpy(mixed), "y": self.labels[idx]}

    def get_split_idxs(self, split: str) -> range:
        return range(self._num_train) if split == "train" else range(self._num_train, len(self.labels))
