"""Bad photographs of digits, each with the clean image that it was taken of: dark on bright, noisy, with a scratch."""

from pathlib import Path

import numpy as np

from pipeline.components import BaseDataset

FILE = Path(__file__).parents[1] / "utils" / "digits.npz"


class Photos(BaseDataset):
    def __init__(self):
        with np.load(FILE) as arrays:
            self.images = arrays["images"].astype(np.float32)[:, None] / 16
            self.labels = arrays["labels"].astype(np.int64)

    def __getitem__(self, idx):
        clean = self.images[idx]
        # Each photograph follows from its number.
        draw = np.random.default_rng(idx)
        photo = 0.9 - 0.7 * clean + draw.normal(0, 0.1, clean.shape)
        photo[:, draw.integers(8)] = draw.uniform()
        return {"photo": photo.astype(np.float32), "clean": clean.copy(), "label": self.labels[idx]}

    def get_split_idxs(self, split):
        fifth = np.arange(len(self.labels)) % 5
        return np.flatnonzero({"train": fifth > 1, "val": fifth == 0, "test": fifth == 1}[split])


dataset = Photos()
