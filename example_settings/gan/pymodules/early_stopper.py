from pipeline.components import RegisterEarlyStopper, parameters

early_stopper = RegisterEarlyStopper("distance", max_epochs=parameters.num_epochs)
