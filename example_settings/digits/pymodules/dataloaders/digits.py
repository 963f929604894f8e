train_dataloader_args = {"batch_size": 32, "num_workers": 0}
eval_dataloader_args = {"batch_size": 128, "num_workers": 0}
