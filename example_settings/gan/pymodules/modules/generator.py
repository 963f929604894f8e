from torch import nn

from pipeline.components import parameters

width = parameters.width
module = nn.Sequential(
    nn.Linear(parameters.num_noise, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
)
