"""Batches of 32, loaded by the training process itself."""

train_dataloader_args = {"batch_size": 32, "num_workers": 0}
eval_dataloader_args = {"batch_size": 32, "num_workers": 0}
