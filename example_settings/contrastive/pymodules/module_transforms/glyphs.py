"""embed sees a batch, loss all rows of a step; the probe reads features that it cannot change."""

import torch
import torch.nn.functional as F

from pipeline.components import BaseModuleTransform

loss_registers = ["contrast", "probe_loss", "probe_accuracy"]


class ModuleTransform(BaseModuleTransform):
    def embed(self, batch, modules):
        features = {name: modules["encoder"](batch[name]) for name in ("first", "second")}
        rows = {name: F.normalize(modules["projector"](feature), dim=1) for name, feature in features.items()}
        return {**rows, "scores": modules["probe"](features["first"].detach()), "glyph": batch["glyph"]}

    def loss(self, rows, modules):
        views = torch.cat([rows["first"], rows["second"]])
        num_points = len(rows["first"])
        # A view is not compared with itself. Its partner is as many rows away as there are points.
        similarities = modules["temperature"](views @ views.T).fill_diagonal_(float("-inf"))
        partners = torch.arange(len(views), device=self.device).roll(num_points)
        losses = F.cross_entropy(similarities, partners, reduction="none")
        return {
            "contrast": (losses[:num_points] + losses[num_points:]) / 2,
            "probe_loss": F.cross_entropy(rows["scores"], rows["glyph"], reduction="none"),
            "probe_accuracy": (rows["scores"].argmax(dim=1) == rows["glyph"]).float(),
        }
