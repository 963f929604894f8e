from pipeline.components import WeightedLossEarlyStopper, parameters

early_stopper = WeightedLossEarlyStopper(max_steps=parameters.num_steps)
