"""The handwritten digits that both datasets of this example use."""

from pathlib import Path

import numpy as np

_FILE = Path(__file__).with_name("digits.npz")


def load_images():
    """Return images of shape (1797, 1, 8, 8) with values from 0 to 1, and their labels."""
    with np.load(_FILE) as arrays:
        images = arrays["images"].astype(np.float32)[:, None] / 16
        return images, arrays["labels"].astype(np.int64)


def split_idxs(num_points, split):
    """Give every fifth point to val, the one after it to test, and the others to train."""
    remainder = np.arange(num_points) % 5
    members = {"train": remainder > 1, "val": remainder == 0, "test": remainder == 1}
    return np.flatnonzero(members[split])
