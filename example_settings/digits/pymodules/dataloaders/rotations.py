from pipeline.components import parameters

train_dataloader_args = {"batch_size": parameters.batch_size, "num_workers": 0}
eval_dataloader_args = {"batch_size": 128, "num_workers": 0}
