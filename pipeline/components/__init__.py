"""The author's vocabulary: contracts that an experiment implements, and ready policies.

One file per kind of pymodule, however short, so that an author finds a contract under the name of the pymodule.
Experiments import from this package only.
"""

from pipeline.components.checkpoint_savers import (
    BaseCheckpointSaver,
    ImprovementCheckpointSaver,
    PeriodicCheckpointSaver,
)
from pipeline.components.data_counters import BaseDataCounter, CategoryCounter, DatasetSizeCounter
from pipeline.components.datasets import BaseDataset, BaseDataTransform
from pipeline.components.early_stoppers import BaseEarlyStopper, RegisterEarlyStopper, WeightedLossEarlyStopper
from pipeline.components.experiment_parameters import Parameters
from pipeline.components.hooks import BaseHook, TrainingState, UnfreezeAt
from pipeline.components.loss_weighters import (
    BaseLossWeighter,
    DynamicWeightAverage,
    MovingAverageLossWeighter,
    StaticLossWeighter,
    UniformLossWeighter,
)
from pipeline.components.losses import Losses, LossRecord, num_finished_epochs, weighted_loss
from pipeline.components.metrics import AUROC, F1, R2, Accuracy, BaseMetric, ConfusionMatrix, MeanIoU
from pipeline.components.module_transforms import BaseModuleTransform
from pipeline.components.optimizers import sharpness_aware
from pipeline.components.position import Position
from pipeline.components.schedulers import BaseScheduler, TorchScheduler, WarmupScheduler
from pipeline.components.stateful import Stateful, load_json, save_json
from pipeline.components.trackers import BaseTracker, Image, Point, TrackedRun

# The values of settings/parameters.json: those of the experiment whose pymodules are being imported.
parameters = Parameters({})

__all__ = [
    "AUROC",
    "F1",
    "R2",
    "Accuracy",
    "BaseCheckpointSaver",
    "BaseDataCounter",
    "BaseDataTransform",
    "BaseDataset",
    "BaseEarlyStopper",
    "BaseHook",
    "BaseLossWeighter",
    "BaseMetric",
    "BaseModuleTransform",
    "BaseScheduler",
    "BaseTracker",
    "CategoryCounter",
    "ConfusionMatrix",
    "DatasetSizeCounter",
    "DynamicWeightAverage",
    "Image",
    "ImprovementCheckpointSaver",
    "LossRecord",
    "Losses",
    "MeanIoU",
    "MovingAverageLossWeighter",
    "Parameters",
    "PeriodicCheckpointSaver",
    "Point",
    "Position",
    "RegisterEarlyStopper",
    "Stateful",
    "StaticLossWeighter",
    "TorchScheduler",
    "TrackedRun",
    "TrainingState",
    "UnfreezeAt",
    "UniformLossWeighter",
    "WarmupScheduler",
    "WeightedLossEarlyStopper",
    "load_json",
    "num_finished_epochs",
    "parameters",
    "save_json",
    "sharpness_aware",
    "weighted_loss",
]
