"""The discriminator tells points from drawn ones; the generator draws what it takes for points."""

import torch
import torch.nn.functional as F

from pipeline.components import BaseModuleTransform, parameters

loss_registers = ["d_loss", "g_loss"]
metrics = ["distance"]


class ModuleTransform(BaseModuleTransform):
    def __call__(self, batch, modules):
        points = batch["point"]
        drawn = self.draw(modules["generator"], len(points))
        judge = modules["discriminator"]
        score = judge(drawn)[:, 0]
        # Nothing is detached: each optimizer follows its own register, and changes its own weights.
        results = {"d_loss": F.softplus(-judge(points)[:, 0]) + F.softplus(score), "g_loss": F.softplus(-score)}
        if not judge.training:
            results["distance"] = (drawn, points)
        return results

    def draw(self, generator, num_points):
        return generator(torch.randn(num_points, parameters.num_noise, device=self.device))

    def images(self, batch, modules):
        places = ((self.draw(modules["generator"], 2000).clamp(-1.4, 1.4) + 1.5) / 3 * 64).long()
        counts = torch.bincount(places[:, 1] * 64 + places[:, 0], minlength=64 * 64).view(64, 64)
        return {"drawn": (counts / 4).clamp(max=1)}
