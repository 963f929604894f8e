from pipeline.components import RegisterEarlyStopper, parameters

early_stopper = RegisterEarlyStopper("probe_accuracy", max_epochs=parameters.num_epochs)
