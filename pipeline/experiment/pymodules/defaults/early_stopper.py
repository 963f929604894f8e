"""Training ends after max_epochs or max_steps of settings/training.json; the lowest weighted loss is the best."""

from pipeline.components import WeightedLossEarlyStopper

early_stopper = WeightedLossEarlyStopper()
