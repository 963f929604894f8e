"""Points near a spiral."""

import numpy as np

from pipeline.components import BaseDataset, parameters


class Spiral(BaseDataset):
    def __init__(self):
        draw = np.random.default_rng(0)
        turn = 3 * np.pi * np.sqrt(draw.uniform(0.05, 1, parameters.num_points))
        curve = turn[:, None] * np.stack([np.cos(turn), np.sin(turn)], axis=1)
        self.points = ((curve + draw.normal(0, 0.2, curve.shape)) / 5).astype(np.float32)

    def __getitem__(self, idx):
        return {"point": self.points[idx]}

    def get_split_idxs(self, split):
        fifth = np.arange(len(self.points)) % 5
        return np.flatnonzero({"train": fifth > 1, "val": fifth == 0, "test": fifth == 1}[split])


dataset = Spiral()
