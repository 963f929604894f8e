"""The same digits, turned by a quarter, a half, three quarters or not at all: which way is up?"""

import numpy as np

from pipeline.components import BaseDataset

from ..utils.images import load_images, split_idxs


class Rotations(BaseDataset):
    def __init__(self):
        self.images, _ = load_images()

    def __getitem__(self, idx):
        turns = idx // 5 % 4
        return {"image": np.rot90(self.images[idx], turns, axes=(1, 2)).copy(), "turns": turns}

    def get_split_idxs(self, split):
        return split_idxs(len(self.images), split)


dataset = Rotations()
