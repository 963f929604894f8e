from pipeline.components import parameters

# A window is one point; each of its characters is an item with a loss of its own.
train_dataloader_args = {"batch_size": parameters.batch_size, "point_size": parameters.context}
