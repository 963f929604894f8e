"""What pymodules are expected to define, as their authors would write it."""

from __future__ import annotations

_STATEFUL = {"save": "folder", "load": "folder"}
# The methods of each object, with their arguments.
METHODS: dict[str, dict[str, str]] = {
    "dataset": {"__getitem__": "idx", "get_split_idxs": "split"},
    "data_counter": {"count": "dataset_name, metadata_point", **_STATEFUL},
    "TrainDataTransform": {"__call__": "data_point"},
    "EvalDataTransform": {"__call__": "data_point"},
    "checkpoint_saver": {"update": "losses, loss_weighter, early_stopper", "save_checkpoints": "", **_STATEFUL},
    "early_stopper": {"update": "losses, loss_weighter", "improvement": "", "early_stop": "", **_STATEFUL},
    "loss_weighter": {
        "before_train_epoch": "losses",
        "after_train_step": "losses",
        "after_train_epoch": "losses",
        "before_eval_epoch": "losses",
        "after_eval_epoch": "losses",
        "get_loss_weight": "register",
        **_STATEFUL,
    },
    "tracker": {"begin": "run", "publish": "points", "close": ""},
}
# The class of pipeline.components that has all of these methods.
BASES = {
    "dataset": "BaseDataset",
    "data_counter": "BaseDataCounter",
    "TrainDataTransform": "BaseDataTransform",
    "EvalDataTransform": "BaseDataTransform",
    "checkpoint_saver": "BaseCheckpointSaver",
    "early_stopper": "BaseEarlyStopper",
    "loss_weighter": "BaseLossWeighter",
    "tracker": "BaseTracker",
}
EXAMPLES = {
    "dataset": "dataset = MyDataset(), of a class that inherits from pipeline.components.BaseDataset",
    "data_counter": 'data_counter = CategoryCounter("label", num_categories=10), from pipeline.components',
    "dataset_names": 'dataset_names = ["digits"], the datasets that are counted',
    "TrainDataTransform": "class TrainDataTransform(BaseDataTransform), with __call__(self, data_point)",
    "EvalDataTransform": "class EvalDataTransform(BaseDataTransform), with __call__(self, data_point)",
    "train_dataloader_args": 'train_dataloader_args = {"batch_size": 32, "num_workers": 0}',
    "eval_dataloader_args": 'eval_dataloader_args = {"batch_size": 32, "num_workers": 0}',
    "module": "module = MyNetwork(), a torch.nn.Module",
    "settings": 'settings = {"frozen": False}',
    "ModuleTransform": "class ModuleTransform(BaseModuleTransform), with __call__(self, batch, modules)",
    "loss_registers": 'loss_registers = ["loss"], the registers that ModuleTransform returns',
    "create_optimizer": "def create_optimizer(modules), which returns a torch optimizer with named param groups",
    "create_scheduler": "def create_scheduler(optimizer), which returns BaseScheduler() for constant learning rates",
    "checkpoint_saver": "checkpoint_saver = PeriodicCheckpointSaver(every_epochs=1), from pipeline.components",
    "early_stopper": "early_stopper = WeightedLossEarlyStopper(max_epochs=10), from pipeline.components",
    "loss_weighter": "loss_weighter = UniformLossWeighter(), from pipeline.components",
    "tracker": "tracker = MyTracker(), of a class that inherits from pipeline.components.BaseTracker",
}
