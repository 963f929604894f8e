"""Points are used as the dataset returns them."""

from pipeline.components import BaseDataTransform

TrainDataTransform = BaseDataTransform
EvalDataTransform = BaseDataTransform
