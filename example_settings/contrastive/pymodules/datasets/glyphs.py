"""Two views of one of 16 glyphs: the same pattern at two random places, with noise."""

import numpy as np

from pipeline.components import BaseDataset, parameters

NUM_GLYPHS = 16
IMAGE = 12
GLYPH = 5
PATTERNS = np.random.default_rng(0).random((NUM_GLYPHS, GLYPH, GLYPH)) < 0.5


class Glyphs(BaseDataset):
    def __getitem__(self, idx):
        glyph = idx % NUM_GLYPHS
        return {"first": self.view(glyph), "second": self.view(glyph), "glyph": glyph}

    @staticmethod
    def view(glyph):
        # The global generator is seeded for each batch, so an epoch shows other views than the one before.
        image = np.random.normal(0, 0.1, (1, IMAGE, IMAGE))
        row, column = np.random.randint(0, IMAGE - GLYPH + 1, 2)
        image[0, row : row + GLYPH, column : column + GLYPH] += PATTERNS[glyph]
        return image.astype(np.float32)

    def get_split_idxs(self, split):
        fifth = np.arange(parameters.num_points) // NUM_GLYPHS % 5
        return np.flatnonzero({"train": fifth > 1, "val": fifth == 0, "test": fifth == 1}[split])


dataset = Glyphs()
