"""What pymodules are expected to define, as their authors would write it."""

from __future__ import annotations

import inspect

from pipeline import components
from pipeline.components.hooks import MOMENTS

# What each name stands for: an object with the methods of this class, whether it inherits from it or not.
BASES: dict[str, type] = {
    "dataset": components.BaseDataset,
    "data_counter": components.BaseDataCounter,
    "TrainDataTransform": components.BaseDataTransform,
    "EvalDataTransform": components.BaseDataTransform,
    "checkpoint_saver": components.BaseCheckpointSaver,
    "early_stopper": components.BaseEarlyStopper,
    "loss_weighter": components.BaseLossWeighter,
    "scheduler": components.BaseScheduler,
    "hook": components.BaseHook,
    "tracker": components.BaseTracker,
}
# Methods that an object need not have, by the name it stands for.
_OPTIONAL_METHODS: dict[str, tuple[str, ...]] = {
    "dataset": ("getitem_metadata",),
    "scheduler": ("after_evaluation",),
    "hook": MOMENTS,
    "tracker": ("publish_images",),
}
_SPECIAL_METHODS = ("__call__", "__getitem__")


def required_methods(name: str) -> dict[str, list[str]]:
    """Return the methods that an object of this name must have, with the names of their arguments."""
    # In the order in which the classes define them, which inspect.getmembers would sort.
    defined = [item for kind in BASES[name].__mro__ for item in vars(kind).items()]
    return {
        method: list(inspect.signature(function).parameters)[1:]
        for method, function in defined
        if inspect.isfunction(function)
        and (method in _SPECIAL_METHODS or not method.startswith("_"))
        and method not in _OPTIONAL_METHODS.get(name, ())
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
    "settings": 'settings = {"frozen": False}, or {"average_of": "backbone"} without a module',
    "ModuleTransform": "class ModuleTransform(BaseModuleTransform), with __call__(self, batch, modules)",
    "loss_registers": 'loss_registers = ["loss"], the registers that ModuleTransform returns',
    "metrics": 'metrics = ["f1"], the files of metrics/ that get what ModuleTransform returns under their names',
    "metric": "metric = MeanIoU(num_classes=10), from pipeline.components",
    "names": 'names = ["precision", "recall"], if compute returns several values',
    "direction": 'direction = "max", or {"precision": "max", "recall": "max"}',
    "create_optimizer": "def create_optimizer(modules), which returns a torch optimizer with named param groups",
    "create_scheduler": "def create_scheduler(optimizer), which returns BaseScheduler() for constant learning rates",
    "checkpoint_saver": "checkpoint_saver = PeriodicCheckpointSaver(every_epochs=1), from pipeline.components",
    "early_stopper": "early_stopper = WeightedLossEarlyStopper(max_epochs=10), from pipeline.components",
    "loss_weighter": "loss_weighter = UniformLossWeighter(), from pipeline.components",
    "hook": 'hook = UnfreezeAt(2, "backbone"), from pipeline.components',
    "tracker": "tracker = MyTracker(), of a class that inherits from pipeline.components.BaseTracker",
}
