"""All losses count alike."""

from pipeline.components import UniformLossWeighter

loss_weighter = UniformLossWeighter()
