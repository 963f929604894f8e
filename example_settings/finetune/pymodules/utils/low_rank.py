"""Low-rank adapters: layers whose weight is fixed, plus a product of two small factors that are trained."""

import torch
import torch.nn.functional as F
from torch import nn

from pipeline.components import parameters


class LowRankConv2d(nn.Conv2d):
    def __init__(self, *sizes, **more):
        super().__init__(*sizes, **more)
        add_factors(self)

    def forward(self, images):
        return self._conv_forward(images, adapted_weight(self), self.bias)


class LowRankLinear(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        add_factors(self)

    def forward(self, features):
        return F.linear(features, adapted_weight(self), self.bias)


def add_factors(layer):
    """Begin as the layer without an adapter: the second factor is zero."""
    num_inputs = layer.weight[0].numel()
    layer.adapter_down = nn.Parameter(torch.randn(parameters.rank, num_inputs) / num_inputs**0.5)
    layer.adapter_up = nn.Parameter(torch.zeros(len(layer.weight), parameters.rank))


def adapted_weight(layer):
    return layer.weight + (layer.adapter_up @ layer.adapter_down).view_as(layer.weight)


def train_adapters_only(module):
    """Freeze what the layers had before; commits then hold it once."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("adapter" in name)
    return module
