"""Random shifts, brightness and noise in training; nothing in evaluation."""

from pipeline.components import BaseDataTransform

from ..utils.augmentation import augment


class TrainDataTransform(BaseDataTransform):
    def __call__(self, data_point):
        data_point["image"] = augment(data_point["image"])


class EvalDataTransform(BaseDataTransform):
    pass
