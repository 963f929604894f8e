"""Which way is up?"""

import torch.nn.functional as F

from pipeline.components import BaseModuleTransform

loss_registers = ["rotation_loss"]


class ModuleTransform(BaseModuleTransform):
    def __call__(self, batch, modules):
        scores = modules["rotation_head"](modules["backbone"](modules["edges"](batch["image"])))
        return {"rotation_loss": F.cross_entropy(scores, batch["turns"], reduction="none")}
