"""The network MODULE."""

from torch import nn

# Any torch.nn.Module, on the CPU: the pipeline moves it to its device.
module = nn.Linear(1, 1)
