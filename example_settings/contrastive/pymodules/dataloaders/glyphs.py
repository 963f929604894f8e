from pipeline.components import parameters

train_dataloader_args = {"batch_size": parameters.batch_size}
# Without gradients there is room for as many points as a step has; an evaluation compares the rows of a batch.
eval_dataloader_args = {"batch_size": 128}
