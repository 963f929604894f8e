"""The next character, at every place of a window."""

import math

import torch.nn.functional as F

from pipeline.components import BaseModuleTransform

loss_registers = ["loss", "bits_per_character"]


class ModuleTransform(BaseModuleTransform):
    def __call__(self, batch, modules):
        scores = modules["transformer"](batch["input"])
        loss = F.cross_entropy(scores.flatten(0, 1), batch["target"].flatten(), reduction="none")
        return {"loss": loss, "bits_per_character": loss.detach() / math.log(2)}
