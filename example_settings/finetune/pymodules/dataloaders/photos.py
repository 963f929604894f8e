from pipeline.components import parameters

train_dataloader_args = {"batch_size": parameters.batch_size}
