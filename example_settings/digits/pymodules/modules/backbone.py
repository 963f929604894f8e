"""Shared by both tasks: from edges to features."""

from torch import nn

from pipeline.components import parameters

module = nn.Sequential(
    nn.Conv2d(3, 32, kernel_size=3, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.Conv2d(32, 48, kernel_size=3, padding=1),
    nn.BatchNorm2d(48),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Dropout(parameters.dropout),
    nn.Linear(48 * 4 * 4, 64),
    nn.ReLU(),
)
settings = {"frozen": False}
