"""One epoch's work in memory: step plan, loaders, losses, gradients, training, evaluation."""
