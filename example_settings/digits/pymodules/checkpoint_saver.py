from pipeline.components import PeriodicCheckpointSaver

checkpoint_saver = PeriodicCheckpointSaver(every_epochs=5, num_to_keep=2)
