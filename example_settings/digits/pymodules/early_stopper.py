from pipeline.components import WeightedLossEarlyStopper

early_stopper = WeightedLossEarlyStopper(max_epochs=15, patience=5, startup=5)
