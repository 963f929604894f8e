from pipeline.components import WeightedLossEarlyStopper

early_stopper = WeightedLossEarlyStopper(max_epochs=12, patience=4, startup=3)
