from torch import nn

module = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
