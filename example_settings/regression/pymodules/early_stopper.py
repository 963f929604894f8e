from pipeline.components import RegisterEarlyStopper, parameters

early_stopper = RegisterEarlyStopper("error_in_metres", max_epochs=parameters.num_epochs, patience=10)
