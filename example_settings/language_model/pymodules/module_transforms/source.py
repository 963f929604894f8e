"""The next character, at every place of a window that is not padding."""

import math

import torch.nn.functional as F

from pipeline.components import BaseModuleTransform

from ..datasets.source import PADDING

loss_registers = ["loss", "bits_per_character"]


class ModuleTransform(BaseModuleTransform):
    def count_items(self, batch):
        num_characters = (batch["target"] != PADDING).sum()
        return dict.fromkeys(loss_registers, num_characters)

    def __call__(self, batch, modules):
        scores = modules["transformer"](batch["input"])
        targets = batch["target"].flatten()
        loss = F.cross_entropy(scores.flatten(0, 1), targets, ignore_index=PADDING, reduction="none")
        return {"loss": loss, "bits_per_character": loss.detach() / math.log(2)}
