"""The energy distance between drawn points and those of the split: 0 if both have the same distribution."""

import torch

from pipeline.components import BaseMetric


class EnergyDistance(BaseMetric):
    combine = "cat"
    direction = "min"

    def update(self, drawn, points):
        return {"drawn": drawn, "points": points}

    def compute(self, state):
        drawn, points = state["drawn"].double(), state["points"].double()
        between = torch.cdist(drawn, points).mean()
        return float(2 * between - torch.cdist(drawn, drawn).mean() - torch.cdist(points, points).mean())


metric = EnergyDistance()
