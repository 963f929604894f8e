"""Metrics: values of a whole split that are no means over items, such as F1, mIoU or AUROC."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

State = dict[str, torch.Tensor]


class BaseMetric:
    """The contract of a metric: a state per batch, how states are combined, and a value of the whole.

    ``combine`` says for all entries of the state, or for each by its name, how those of two batches become one:
    ``"sum"``, ``"min"``, ``"max"``, or ``"cat"`` for rows in the order of the split. Nothing depends on how a split is
    cut into batches and processes: integers are summed exactly, floats in float64 in a fixed order.
    """

    combine: str | Mapping[str, str] = "sum"
    direction = "max"

    # What a batch has for a metric is up to the module transform.
    def update(self, *arguments: Any) -> State:
        """Return the state of one batch alone."""
        raise TypeError(f"{type(self).__name__} must define update(…).")

    def compute(self, state: State) -> float | Mapping[str, float]:
        """Return the value of the combined state, or several by name; called on rank 0 with tensors on the CPU."""
        raise TypeError(f"{type(self).__name__} must define compute(state).")


class ConfusionMatrix(BaseMetric):
    """Counts how often each class was taken for each other; the base of metrics of classes.

    Predictions are classes, or scores with the classes in dimension 1. Targets that are ``ignore_index`` do not count.
    """

    def __init__(self, num_classes: int, ignore_index: int = -100) -> None:
        if num_classes < 2:
            raise ValueError(f"num_classes must be 2 or more, but is {num_classes} instead.")
        self.num_classes = num_classes
        self.ignore_index = ignore_index

    def update(self, predictions: torch.Tensor, targets: torch.Tensor) -> State:
        if predictions.dim() > targets.dim():
            predictions = predictions.argmax(dim=1)
        if predictions.shape != targets.shape:
            raise ValueError(
                f"predictions and targets must have one shape, but have {tuple(predictions.shape)} and "
                f"{tuple(targets.shape)}."
            )
        # Ignored pairs are counted in a row of their own, which is cut off: a selection would wait for the device.
        rows = targets.where(targets != self.ignore_index, self.num_classes).reshape(-1).long()
        pairs = rows * self.num_classes + predictions.reshape(-1).long()
        size = (self.num_classes + 1) * self.num_classes
        counts = torch.zeros(size, dtype=torch.int64, device=pairs.device)
        counts.scatter_add_(0, pairs, torch.ones_like(pairs))
        return {"matrix": counts.view(-1, self.num_classes)[: self.num_classes]}

    def compute(self, state: State) -> float | Mapping[str, float]:
        return self.value(state["matrix"].double())

    def value(self, matrix: torch.Tensor) -> float:
        """Return the value of a matrix whose rows are the classes of the targets."""
        raise TypeError(f"{type(self).__name__} must define value(matrix).")

    @staticmethod
    def mean_over_classes(numerators: torch.Tensor, denominators: torch.Tensor) -> float:
        """Return the mean of a ratio over the classes for which it is defined."""
        defined = denominators > 0
        return float((numerators[defined] / denominators[defined]).mean()) if defined.any() else math.nan


class Accuracy(ConfusionMatrix):
    """The share of right predictions."""

    def value(self, matrix: torch.Tensor) -> float:
        return float(matrix.diagonal().sum() / matrix.sum())


class F1(ConfusionMatrix):
    """The mean of the F1 scores of all classes that occur in targets or predictions."""

    def value(self, matrix: torch.Tensor) -> float:
        return self.mean_over_classes(2 * matrix.diagonal(), matrix.sum(dim=0) + matrix.sum(dim=1))


class MeanIoU(ConfusionMatrix):
    """The mean over classes of intersection over union, of all classes that occur in targets or predictions."""

    def value(self, matrix: torch.Tensor) -> float:
        both = matrix.diagonal()
        return self.mean_over_classes(both, matrix.sum(dim=0) + matrix.sum(dim=1) - both)


class R2(BaseMetric):
    """The share of the targets' variance that predictions explain; NaN if the targets are all the same."""

    def update(self, predictions: torch.Tensor, targets: torch.Tensor) -> State:
        if predictions.shape != targets.shape:
            raise ValueError(
                f"predictions and targets must have one shape, but have {tuple(predictions.shape)} and "
                f"{tuple(targets.shape)}."
            )
        targets = targets.double()
        return {
            "number": torch.tensor(targets.numel()),
            "total": targets.sum(),
            "squares": targets.square().sum(),
            "errors": (predictions.double() - targets).square().sum(),
        }

    def compute(self, state: State) -> float:
        variation = state["squares"] - state["total"].square() / state["number"]
        return float(1 - state["errors"] / variation) if variation > 0 else math.nan


class AUROC(BaseMetric):
    """The area under the ROC curve of scores for targets of 0 and 1; NaN if there is one class only.

    The scores of the whole split are kept, on the host.
    """

    combine = "cat"

    def update(self, scores: torch.Tensor, targets: torch.Tensor) -> State:
        if scores.shape != targets.shape:
            raise ValueError(
                f"scores and targets must have one shape, but have {tuple(scores.shape)} and {tuple(targets.shape)}."
            )
        return {"scores": scores.reshape(-1).float(), "targets": targets.reshape(-1).bool()}

    def compute(self, state: State) -> float:
        positive = state["targets"]
        num_positive = int(positive.sum())
        num_pairs = num_positive * (len(positive) - num_positive)
        if not num_pairs:
            return math.nan
        # The probability that a positive has the higher score, from ranks; equal scores share the mean of theirs.
        _, groups, sizes = state["scores"].unique(return_inverse=True, return_counts=True)
        last_ranks = sizes.cumsum(0).double()
        ranks = (last_ranks - (sizes.double() - 1) / 2)[groups]
        return float((ranks[positive].sum() - num_positive * (num_positive + 1) / 2) / num_pairs)
