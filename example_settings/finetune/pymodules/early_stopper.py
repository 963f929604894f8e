from pipeline.components import WeightedLossEarlyStopper, parameters

early_stopper = WeightedLossEarlyStopper(max_epochs=parameters.num_epochs)
