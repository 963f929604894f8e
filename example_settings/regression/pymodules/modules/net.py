from torch import nn

from pipeline.components import parameters

module = nn.Sequential(
    nn.Linear(5, parameters.width),
    nn.SiLU(),
    nn.Linear(parameters.width, parameters.width),
    nn.SiLU(),
    nn.Linear(parameters.width, 1),
)
