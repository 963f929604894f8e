"""Windows of source code. The text is that of the Python in use; it is not copied into the results."""

import sysconfig
from pathlib import Path

import numpy as np

from pipeline.components import BaseDataset, parameters


class SourceCode(BaseDataset):
    def __init__(self):
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = "\n".join(path.read_text("utf-8", errors="replace") for path in files)
        # Printable ASCII and the new line; everything else is a question mark.
        codes = np.frombuffer(text.encode("ascii", "replace"), dtype=np.uint8)
        self.characters = np.where((codes >= 32) & (codes < 127), codes - 31, np.where(codes == 10, 0, 32))

    def __getitem__(self, idx):
        start = idx * parameters.context
        window = self.characters[start : start + parameters.context + 1].astype(np.int64)
        return {"input": window[:-1], "target": window[1:]}

    def get_split_idxs(self, split):
        num_windows = (len(self.characters) - 1) // parameters.context
        # Whole stretches of text: neighbours of validation windows must not be trained on.
        stretch = np.arange(num_windows) // 100 % 20
        members = {"train": stretch > 1, "val": stretch == 0, "test": stretch == 1}
        return np.flatnonzero(members[split])[: parameters.max_eval_windows if split != "train" else None]


dataset = SourceCode()
