"""The backbone of the digits example, with layers of choice."""

from torch import nn


def backbone(convolution=nn.Conv2d, linear=nn.Linear):
    return nn.Sequential(
        convolution(3, 32, kernel_size=3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        convolution(32, 48, kernel_size=3, padding=1),
        nn.BatchNorm2d(48),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        linear(48 * 4 * 4, 64),
        nn.ReLU(),
    )
