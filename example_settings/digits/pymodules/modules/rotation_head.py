from torch import nn

module = nn.Linear(64, 4)
settings = {"frozen": False}
