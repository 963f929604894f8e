from pipeline.components import RegisterEarlyStopper, parameters

early_stopper = RegisterEarlyStopper("miou", max_epochs=parameters.num_epochs, patience=4)
