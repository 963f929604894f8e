"""Loss weighters: how much each register counts in the gradient and in ``WeightedLossEarlyStopper``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from pipeline.components.losses import Losses
from pipeline.components.stateful import Stateful, load_json, save_json

# A register whose loss is zero must not get an infinite weight.
_MIN_AVERAGE = 1e-12


class BaseLossWeighter(Stateful):
    """The contract of a loss weighter. This base weighs every register with 1: override what the policy needs.

    All methods are called on every rank with the same values. Overriding ``after_train_step`` costs one small
    all-reduce per step, because the losses of the step must then be summed over the ranks.
    """

    def before_train_epoch(self, losses: Losses) -> None:
        """Called before the first step of a training epoch."""

    def after_train_step(self, losses: Losses) -> None:
        """Called after each step; the step's values are the last of ``step_means``."""

    def after_train_epoch(self, losses: Losses) -> None:
        """Called after the last step; the epoch's values are the last of ``epoch_means``."""

    def before_eval_epoch(self, losses: Losses) -> None:
        """Called before an evaluation."""

    def after_eval_epoch(self, losses: Losses) -> None:
        """Called after an evaluation; its values are the last of ``epoch_means`` of the split."""

    def get_loss_weight(self, register: str) -> float:
        """Return the current weight of a register."""
        return 1.0


class UniformLossWeighter(BaseLossWeighter):
    """Weighs all registers with 1: the base policy under a telling name."""


class StaticLossWeighter(BaseLossWeighter):
    """Weighs each register with a fixed number; registers not named weigh 1."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.weights = dict(weights)

    def get_loss_weight(self, register: str) -> float:
        return float(self.weights.get(register, 1.0))


class _AdaptiveLossWeighter(BaseLossWeighter):
    """A policy whose weights change during the training, so that they are saved."""

    def __init__(self) -> None:
        self.weights: dict[str, float] = {}

    def get_loss_weight(self, register: str) -> float:
        return self.weights.get(register, 1.0)

    def save(self, folder: Path) -> None:
        save_json(folder, {"weights": self.weights})

    def load(self, folder: Path) -> None:
        self.weights = load_json(folder)["weights"]


class DynamicWeightAverage(_AdaptiveLossWeighter):
    """Gives more weight to registers whose training loss falls more slowly (Liu et al., 2019).

    The weights of an epoch are a softmax over the ratios of the last two epochs' losses, scaled so that
    they sum to the number of registers. A high ``temperature`` makes them more alike.
    """

    def __init__(self, temperature: float = 2.0) -> None:
        super().__init__()
        self.temperature = temperature

    def before_train_epoch(self, losses: Losses) -> None:
        ratios: dict[str, float] = {}
        for register, record in losses["train"].items():
            if record.optimize:
                # The weights stay as they are in the first two epochs, and after a loss of zero.
                if len(record.epoch_means) < 2 or not record.epoch_means[-2]:
                    return
                ratios[register] = record.epoch_means[-1] / record.epoch_means[-2]
        if not ratios or not all(math.isfinite(ratio) for ratio in ratios.values()):
            return
        # Without subtracting the maximum, exp could overflow.
        highest = max(ratios.values())
        exponentials = {name: math.exp((ratio - highest) / self.temperature) for name, ratio in ratios.items()}
        scale = len(ratios) / sum(exponentials.values())
        self.weights = {name: scale * value for name, value in exponentials.items()}


class MovingAverageLossWeighter(_AdaptiveLossWeighter):
    """Brings all registers to the same scale: weights are inverse to a moving average of the step losses.

    ``decay`` is the share of the old average that is kept at each step. The weights sum to the number of registers.
    """

    def __init__(self, decay: float = 0.99) -> None:
        super().__init__()
        self.decay = decay
        self.averages: dict[str, float] = {}

    def after_train_step(self, losses: Losses) -> None:
        for register, record in losses["train"].items():
            # A skipped step has a NaN mean. One of them would stay in the average for ever.
            if record.optimize and math.isfinite(record.step_means[-1]):
                # A loss may be negative; only its scale matters here.
                latest = abs(record.step_means[-1])
                average = self.averages.get(register, latest)
                self.averages[register] = self.decay * average + (1 - self.decay) * latest
        inverse = {register: 1 / max(average, _MIN_AVERAGE) for register, average in self.averages.items()}
        scale = len(inverse) / sum(inverse.values()) if inverse else 1.0
        self.weights = {register: scale * value for register, value in inverse.items()}

    def save(self, folder: Path) -> None:
        save_json(folder, {"weights": self.weights, "averages": self.averages})

    def load(self, folder: Path) -> None:
        super().load(folder)
        self.averages = load_json(folder)["averages"]
