from pipeline.components import PeriodicCheckpointSaver

checkpoint_saver = PeriodicCheckpointSaver(every_epochs=4, num_to_keep=2)
