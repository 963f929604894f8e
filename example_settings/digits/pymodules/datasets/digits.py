"""Digits to recognise."""

from pipeline.components import BaseDataset

from ..utils.images import load_images, split_idxs


class Digits(BaseDataset):
    def __init__(self):
        self.images, self.labels = load_images()

    def __getitem__(self, idx):
        return {"image": self.images[idx].copy(), "label": self.labels[idx]}

    def get_split_idxs(self, split):
        return split_idxs(len(self.labels), split)

    def getitem_metadata(self, idx):
        return {"label": int(self.labels[idx])}


dataset = Digits()
