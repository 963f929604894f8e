"""Metrics: values of a whole split that are not means over items, such as F1, mIoU or AUROC."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

State = dict[str, torch.Tensor]
# A variance that is this small beside the mean is rounding.
_RELATIVE_ROUNDING = 1e-12


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


def _check_same_shape(name: str, values: torch.Tensor, targets: torch.Tensor) -> None:
    # Broadcasting them would give a number that means nothing.
    if values.shape != targets.shape:
        raise ValueError(
            f"{name} and targets must have one shape, but have {tuple(values.shape)} and {tuple(targets.shape)}."
        )


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
        num_classes = self.num_classes
        if predictions.dim() > targets.dim():
            if predictions.shape[1] != num_classes:
                raise ValueError(f"scores must be of {num_classes} classes, but are of {predictions.shape[1]}.")
            columns = predictions.argmax(dim=1)
        elif predictions.is_floating_point():
            raise ValueError("predictions must be classes, or scores with the classes in dimension 1.")
        else:
            columns = predictions.where((predictions >= 0) & (predictions < num_classes), num_classes).long()
        _check_same_shape("predictions", columns, targets)
        # A selection would wait for the device, so all pairs are counted: what is ignored in a row of its own, and
        # classes that do not exist in the last row and column.
        rows = targets.where((targets >= 0) & (targets < num_classes), num_classes + 1)
        rows = rows.where(targets != self.ignore_index, num_classes)
        pairs = columns.add(rows, alpha=num_classes + 1).reshape(-1)
        counts = torch.zeros((num_classes + 2) * (num_classes + 1), dtype=torch.int64, device=pairs.device)
        counts.scatter_(0, pairs, 1, reduce="add")
        return {"matrix": counts.view(num_classes + 2, num_classes + 1)}

    def compute(self, state: State) -> float | Mapping[str, float]:
        size = self.num_classes
        matrix = state["matrix"]
        num_unknown = int(matrix[size + 1].sum() + matrix[:size, size].sum())
        if num_unknown:
            raise ValueError(f"classes must be from 0 to {size - 1}, but {num_unknown} are not.")
        return self.value(matrix[:size, :size].double())

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

    # A row per batch: sums of squares of the whole would cancel where targets are far from 0.
    combine = "cat"

    def update(self, predictions: torch.Tensor, targets: torch.Tensor) -> State:
        _check_same_shape("predictions", predictions, targets)
        targets = targets.double()
        mean = targets.mean()
        errors = (predictions.double() - targets).square().sum()
        number = torch.full_like(mean, targets.numel())
        return {"rows": torch.stack([number, mean, (targets - mean).square().sum(), errors]).view(1, 4)}

    def compute(self, state: State) -> float:
        numbers, means, within, errors = state["rows"].unbind(dim=1)
        mean = (numbers * means).sum() / numbers.sum()
        variation = within.sum() + (numbers * (means - mean).square()).sum()
        is_constant = variation <= numbers.sum() * (mean * _RELATIVE_ROUNDING).square()
        return math.nan if is_constant else float(1 - errors.sum() / variation)


class AUROC(BaseMetric):
    """The area under the ROC curve of scores for targets of 0 and 1; NaN if there is one class only, or a NaN score.

    The scores of the whole split are kept, on the host.
    """

    combine = "cat"

    def update(self, scores: torch.Tensor, targets: torch.Tensor) -> State:
        _check_same_shape("scores", scores, targets)
        return {"scores": scores.reshape(-1).float(), "targets": targets.reshape(-1).bool()}

    def compute(self, state: State) -> float:
        positive = state["targets"]
        num_positive = int(positive.sum())
        num_pairs = num_positive * (len(positive) - num_positive)
        if not num_pairs or state["scores"].isnan().any():
            return math.nan
        # The probability that a positive has the higher score, from ranks; equal scores share the mean of theirs.
        _, groups, sizes = state["scores"].unique(return_inverse=True, return_counts=True)
        last_ranks = sizes.cumsum(0).double()
        ranks = (last_ranks - (sizes.double() - 1) / 2)[groups]
        return float((ranks[positive].sum() - num_positive * (num_positive + 1) / 2) / num_pairs)
