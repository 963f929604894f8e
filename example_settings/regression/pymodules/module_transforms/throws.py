"""Huber's loss is trained on; the error in metres is recorded beside it."""

import torch.nn.functional as F

from pipeline.components import BaseModuleTransform

loss_registers = ["loss", "error_in_metres"]


class ModuleTransform(BaseModuleTransform):
    def __call__(self, batch, modules):
        distances = modules["net"](batch["throw"])[:, 0]
        return {
            "loss": F.huber_loss(distances, batch["distance"], reduction="none"),
            "error_in_metres": (distances - batch["distance"]).abs(),
        }

    def predict(self, batch, modules):
        return {"distance": modules["net"](batch["throw"])[:, 0]}
