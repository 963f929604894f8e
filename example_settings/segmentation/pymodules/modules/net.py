"""Convolutions whose field of view doubles from one to the next, and scores of three classes for each pixel."""

from torch import nn

from pipeline.components import parameters


def layer(num_inputs, num_outputs, dilation):
    convolution = nn.Conv2d(num_inputs, num_outputs, 3, padding=dilation, dilation=dilation, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(num_outputs), nn.ReLU())


width = parameters.width
module = nn.Sequential(
    layer(1, width, 1), layer(width, width, 2), layer(width, width, 4), layer(width, width, 8), nn.Conv2d(width, 3, 1)
)
