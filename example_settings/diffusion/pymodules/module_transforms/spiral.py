"""Trains on points with noise of a random level; evaluations also draw points from noise alone."""

import math

import torch

from pipeline.components import BaseModuleTransform, parameters

loss_registers = ["noise_loss"]
metrics = ["distance"]


class ModuleTransform(BaseModuleTransform):
    def __init__(self, data_counters, device, logger):
        super().__init__(data_counters, device, logger)
        # The share of the point itself at each level, which falls like a cosine.
        turns = torch.linspace(0, 1, parameters.num_levels + 1, device=device)[1:]
        self.kept = (0.5 * math.pi * turns).cos().square().clamp(1e-3, 0.999)

    def __call__(self, batch, modules):
        points = batch["point"]
        numbers = torch.randint(0, len(self.kept), (len(points),), device=points.device)
        noise = torch.randn_like(points)
        kept = self.kept[numbers][:, None]
        found = modules["net"](kept.sqrt() * points + (1 - kept).sqrt() * noise, numbers / len(self.kept))
        results = {"noise_loss": (found - noise).square().mean(dim=1)}
        if not modules["net"].training:
            results["distance"] = (self.draw(modules["net"], len(points)), points)
        return results

    def draw(self, net, num_points):
        """Return points made of noise, one level after the other (DDIM: Song et al., 2021)."""
        points = torch.randn(num_points, 2, device=self.device)
        for number in reversed(range(len(self.kept))):
            level = torch.full((num_points,), number / len(self.kept), device=self.device)
            noise = net(points, level)
            origin = (points - (1 - self.kept[number]).sqrt() * noise) / self.kept[number].sqrt()
            kept = self.kept[number - 1] if number else torch.ones((), device=self.device)
            points = kept.sqrt() * origin + (1 - kept).sqrt() * noise
        return points

    def images(self, batch, modules):
        points = self.draw(modules["net"], 2000).clamp(-2.4, 2.4)
        places = ((points + 2.5) / 5 * 64).long()
        counts = torch.bincount(places[:, 1] * 64 + places[:, 0], minlength=64 * 64).view(64, 64)
        return {"drawn": (counts / 4).clamp(max=1)}
