"""What can be read off the features by a linear layer."""

from torch import nn

from ..datasets.glyphs import NUM_GLYPHS

module = nn.Linear(64, NUM_GLYPHS)
