from torch import nn

module = nn.Sequential(nn.ReLU(), nn.Linear(64, 64))
