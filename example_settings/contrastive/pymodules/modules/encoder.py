"""Convolutions of which the strongest response counts, wherever it is."""

from torch import nn

from pipeline.components import parameters

width = parameters.width
module = nn.Sequential(
    nn.Conv2d(1, width, 5, padding=2),
    nn.ReLU(),
    nn.Conv2d(width, width, 3, padding=1, stride=2),
    nn.ReLU(),
    nn.Conv2d(width, 2 * width, 3, padding=1, stride=2),
    nn.ReLU(),
    nn.AdaptiveMaxPool2d(1),
    nn.Flatten(),
    nn.Linear(2 * width, 64),
)
