from torch import nn

from pipeline.components import parameters

width = parameters.width
module = nn.Sequential(
    nn.Linear(2, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, 1)
)
