"""The ready metrics, beside torchmetrics on one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassF1Score, MulticlassJaccardIndex
from torchmetrics.regression import R2Score

from pipeline.components import AUROC, F1, R2, Accuracy, BaseMetric, MeanIoU
from pipeline.training.metrics import adapt

NUM_CLASSES = 5


def evaluate(metric: BaseMetric, batches: list[tuple[torch.Tensor, ...]]) -> float:
    """Return the value of a metric over batches."""
    adapter = adapt(metric)
    state = adapter.state_of(batches[0])
    for batch in batches[1:]:
        state = adapter.add(state, adapter.state_of(batch))
    return float(adapter.compute(state))  # type: ignore[arg-type]


def draw_classes(seed: int) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(seed)
    batches: list[tuple[torch.Tensor, ...]] = []
    for size in (1, 7, 16):
        targets = torch.randint(0, NUM_CLASSES, (size, 3), generator=generator)
        scores = torch.randn(size, NUM_CLASSES, 3, generator=generator)
        batches.append((scores, targets))
    return batches


PAIRS: dict[str, tuple[BaseMetric, Any]] = {
    "accuracy": (Accuracy(NUM_CLASSES), MulticlassAccuracy(NUM_CLASSES, average="micro")),
    "f1": (F1(NUM_CLASSES), MulticlassF1Score(NUM_CLASSES, average="macro")),
    "iou": (MeanIoU(NUM_CLASSES), MulticlassJaccardIndex(NUM_CLASSES, average="macro")),
}


@pytest.mark.parametrize(("ours", "theirs"), PAIRS.values(), ids=PAIRS.keys())
@pytest.mark.parametrize("seed", range(3))
def test_metrics_of_classes_are_those_of_torchmetrics(ours: BaseMetric, theirs: Any, seed: int) -> None:
    """Over several batches, of which the first has one point."""
    theirs.reset()
    batches = draw_classes(seed)
    for batch in batches:
        theirs.update(*batch)
    assert evaluate(ours, batches) == pytest.approx(float(theirs.compute()), abs=1e-6)


def test_ignored_targets_do_not_count() -> None:
    """Whatever was predicted for them."""
    predictions, targets = torch.tensor([0, 1, 1, 0]), torch.tensor([0, 1, 0, -100])
    assert evaluate(Accuracy(2), [(predictions, targets)]) == pytest.approx(2 / 3)
    assert evaluate(MeanIoU(2, ignore_index=0), [(predictions, targets.clamp(min=0))]) == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(4))
def test_auroc_is_that_of_torchmetrics(seed: int) -> None:
    """Equal scores included, however the split is cut."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(60, generator=generator).mul(10).round().div(10)
    targets = torch.rand(60, generator=generator) < scores
    theirs = BinaryAUROC()
    theirs.update(scores, targets.long())
    batches = list(zip(scores.split(13), targets.split(13), strict=True))
    assert evaluate(AUROC(), batches) == pytest.approx(float(theirs.compute()), abs=1e-6)


def test_auroc_of_one_class_is_not_a_number() -> None:
    """There is no pair to compare."""
    assert math.isnan(evaluate(AUROC(), [(torch.rand(4), torch.ones(4))]))


def test_r2_is_that_of_torchmetrics() -> None:
    """And not a number if there is no variance to explain."""
    targets = torch.linspace(0, 3, 20)
    predictions = targets + torch.sin(targets * 5)
    theirs = R2Score()
    theirs.update(predictions, targets)
    batches = list(zip(predictions.split(7), targets.split(7), strict=True))
    assert evaluate(R2(), batches) == pytest.approx(float(theirs.compute()), abs=1e-5)
    assert math.isnan(evaluate(R2(), [(predictions, torch.ones(20))]))


@pytest.mark.parametrize(
    ("metric", "arguments"),
    [
        (MeanIoU(3), (torch.zeros(4, dtype=torch.long), torch.zeros(5, dtype=torch.long))),
        (R2(), (torch.zeros(4, 1), torch.zeros(4))),
        (AUROC(), (torch.zeros(4, 1), torch.zeros(4))),
    ],
)
def test_shapes_that_do_not_match_are_named(metric: BaseMetric, arguments: tuple[torch.Tensor, ...]) -> None:
    """Broadcasting them would give a number that means nothing."""
    with pytest.raises(ValueError, match="must have one shape, but have"):
        metric.update(*arguments)


MEANINGLESS: dict[str, tuple[BaseMetric, tuple[torch.Tensor, ...], str]] = {
    "more outputs than classes": (F1(3), (torch.rand(4, 4), torch.zeros(4).long()), "of 3 classes, but are of 4"),
    "probabilities": (Accuracy(2), (torch.tensor([0.9, 0.2]), torch.tensor([1, 0])), "must be classes, or scores"),
    "a target that does not exist": (MeanIoU(3), (torch.tensor([0, 1]), torch.tensor([0, 3])), "0 to 2, but 1 are not"),
    "a prediction that does not exist": (MeanIoU(3), (torch.tensor([3]), torch.tensor([0])), "0 to 2, but 1 are not"),
}


@pytest.mark.parametrize(("metric", "batch", "said"), MEANINGLESS.values(), ids=MEANINGLESS.keys())
def test_classes_that_do_not_exist_are_refused(metric: BaseMetric, batch: tuple[torch.Tensor, ...], said: str) -> None:
    """They would be counted as others, and the value would look right."""
    with pytest.raises(ValueError, match=said):
        evaluate(metric, [batch])


def test_r2_of_large_targets_is_exact() -> None:
    """Sums of squares would cancel, for time stamps for example."""
    targets = torch.linspace(0, 1, 50, dtype=torch.float64) + 1.7e9
    assert evaluate(R2(), list(zip(targets.split(9), targets.split(9), strict=True))) == 1.0
    assert math.isnan(evaluate(R2(), [(targets[:9], torch.full((9,), 1.7))]))


def test_auroc_of_a_diverged_model_is_not_a_number() -> None:
    """It must not become the best."""
    assert math.isnan(evaluate(AUROC(), [(torch.full((4,), math.nan), torch.tensor([1, 0, 1, 0]))]))
