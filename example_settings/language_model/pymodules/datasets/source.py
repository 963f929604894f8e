"""Windows of source files, the last one of each shorter. The text is not copied into the results."""

import sysconfig
from pathlib import Path

import numpy as np

from pipeline.components import BaseDataset, parameters

PADDING = -100


class SourceCode(BaseDataset):
    def __init__(self):
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self.texts = [self.encode(path.read_text("utf-8", errors="replace")) for path in files]
        # File and first character of each window.
        self.windows = [
            (number, start)
            for number, text in enumerate(self.texts)
            for start in range(0, len(text) - 1, parameters.context)
        ]

    @staticmethod
    def encode(text):
        # Printable ASCII and the new line; everything else is a question mark.
        codes = np.frombuffer(text.encode("ascii", "replace"), dtype=np.uint8)
        return np.where((codes >= 32) & (codes < 127), codes - 31, np.where(codes == 10, 0, 32))

    def __getitem__(self, idx):
        number, start = self.windows[idx]
        window = self.texts[number][start : start + parameters.context + 1].astype(np.int64)
        missing = (0, parameters.context + 1 - len(window))
        return {
            "input": np.pad(window[:-1], missing),
            "target": np.pad(window[1:], missing, constant_values=PADDING),
        }

    def get_split_idxs(self, split):
        # Whole stretches of text: neighbours of validation windows must not be trained on.
        stretch = np.arange(len(self.windows)) // 100 % 20
        members = {"train": stretch > 1, "val": stretch == 0, "test": stretch == 1}
        return np.flatnonzero(members[split])[: parameters.max_eval_windows if split != "train" else None]


dataset = SourceCode()
