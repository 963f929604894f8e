"""Loss weighters: how much each register counts in the gradient and in the early stopper's target."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from pipeline.components.losses import Losses, LossRecord
from pipeline.components.stateful import Stateful, load_json, save_json


class BaseLossWeighter(Stateful):
    """Weighs every register with 1; override what the policy needs.

    All methods are called on every rank with the same values. Overriding ``after_train_step`` costs one
    small communication per step, because the losses of the step must then be summed over the ranks.
    """

    def before_train_epoch(self, losses: Losses) -> None:
        """Called before the first step of a training epoch."""

    def after_train_step(self, losses: Losses) -> None:
        """Called after each step; the step's values are the last of ``step_means``."""

    def after_train_epoch(self, losses: Losses) -> None:
        """Called after the last step, with the epoch's values added."""

    def before_eval_epoch(self, losses: Losses) -> None:
        """Called before an evaluation."""

    def after_eval_epoch(self, losses: Losses) -> None:
        """Called after an evaluation, with its values added."""

    def get_loss_weight(self, register: str) -> float:
        """Return the weight that holds now."""
        return 1.0


class UniformLossWeighter(BaseLossWeighter):
    """Weighs all registers alike: the base policy under a name that says so."""


class StaticLossWeighter(BaseLossWeighter):
    """Weighs each register with a fixed number; registers not named weigh 1."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.weights = dict(weights)

    def get_loss_weight(self, register: str) -> float:
        return float(self.weights.get(register, 1.0))


class _AdaptiveLossWeighter(BaseLossWeighter):
    """A policy whose weights change and must survive."""

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
        ratios = {register: _ratio(record) for register, record in losses["train"].items() if record.optimize}
        if not ratios or not all(math.isfinite(ratio) for ratio in ratios.values()):
            return
        highest = max(ratios.values())
        exponentials = {name: math.exp((ratio - highest) / self.temperature) for name, ratio in ratios.items()}
        scale = len(ratios) / sum(exponentials.values())
        self.weights = {name: scale * value for name, value in exponentials.items()}


def _ratio(record: LossRecord) -> float:
    if len(record.epoch_means) < 2 or not record.epoch_means[-2]:
        return math.nan
    return record.epoch_means[-1] / record.epoch_means[-2]


class MovingAverageLossWeighter(_AdaptiveLossWeighter):
    """Keeps all registers at the same scale: weights are inverse to a moving average of the step losses.

    ``decay`` is the share of the old average kept at each step. The weights sum to the number of registers.
    """

    def __init__(self, decay: float = 0.99) -> None:
        super().__init__()
        self.decay = decay
        self.averages: dict[str, float] = {}

    def after_train_step(self, losses: Losses) -> None:
        for register, record in losses["train"].items():
            if record.optimize and math.isfinite(record.step_means[-1]):
                latest = abs(record.step_means[-1])
                average = self.averages.get(register, latest)
                self.averages[register] = self.decay * average + (1 - self.decay) * latest
        self._balance()

    def _balance(self) -> None:
        inverse = {register: 1 / max(average, 1e-12) for register, average in self.averages.items()}
        scale = len(inverse) / sum(inverse.values()) if inverse else 1.0
        self.weights = {register: scale * value for register, value in inverse.items()}

    def save(self, folder: Path) -> None:
        save_json(folder, {"weights": self.weights, "averages": self.averages})

    def load(self, folder: Path) -> None:
        super().load(folder)
        self.averages = load_json(folder)["averages"]
