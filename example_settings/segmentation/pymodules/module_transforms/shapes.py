"""The loss is a mean over the pixels that count; mIoU sees all of them."""

import torch.nn.functional as F

from pipeline.components import BaseModuleTransform

from ..datasets.shapes import IGNORED

loss_registers = ["pixel_loss"]
metrics = ["miou"]


class ModuleTransform(BaseModuleTransform):
    def count_items(self, batch):
        return {"pixel_loss": (batch["labels"] != IGNORED).sum()}

    def __call__(self, batch, modules):
        scores = modules["net"](batch["image"])
        loss = F.cross_entropy(scores, batch["labels"], ignore_index=IGNORED, reduction="none")
        return {"pixel_loss": loss, "miou": (scores, batch["labels"])}

    def images(self, batch, modules):
        found = modules["net"](batch["image"][:1]).argmax(dim=1)[0]
        return {"image": batch["image"][0, 0].clamp(0, 1), "found": found / 2}
