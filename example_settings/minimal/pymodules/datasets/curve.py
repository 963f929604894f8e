import torch


class Curve:
    def __getitem__(self, idx):
        x = torch.tensor([idx / 500 - 1])
        return {"x": x, "y": torch.sin(3 * x)}

    def get_split_idxs(self, split):
        return [idx for idx in range(1000) if (idx % 5 == 0) == (split == "val")]


dataset = Curve()
