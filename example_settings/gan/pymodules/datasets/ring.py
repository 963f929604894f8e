"""Points in eight clouds on a ring."""

import numpy as np

from pipeline.components import BaseDataset, parameters


class Ring(BaseDataset):
    def __init__(self):
        draw = np.random.default_rng(0)
        turns = draw.integers(8, size=parameters.num_points) * np.pi / 4
        centres = np.stack([np.cos(turns), np.sin(turns)], axis=1)
        self.points = (centres + draw.normal(0, 0.05, centres.shape)).astype(np.float32)

    def __getitem__(self, idx):
        return {"point": self.points[idx]}

    def get_split_idxs(self, split):
        fifth = np.arange(len(self.points)) % 5
        return np.flatnonzero({"train": fifth > 1, "val": fifth == 0, "test": fifth == 1}[split])


dataset = Ring()
