from torch import nn

module = nn.Linear(64, 10)
settings = {"frozen": False}
