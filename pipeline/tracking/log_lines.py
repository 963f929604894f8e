"""Log lines: one shape for every loop, easy to grep."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pipeline.components import Losses


def train_line(
    epoch: int, place: tuple[int, int], values: Mapping[str, str], losses: Mapping[str, float], norm: float
) -> str:
    """Return e.g. ``Epoch(train) [3][120/150]  lr: 3.543e-05, eta: 0:13:52, …, loss: 0.1381, grad_norm: 1.4511``."""
    words = [f"{name}: {value}" for name, value in values.items()]
    words += [f"{name}: {value:.4f}" for name, value in losses.items()]
    return f"Epoch(train) [{epoch}][{place[0]}/{place[1]}]  {', '.join([*words, f'grad_norm: {norm:.4f}'])}"


def val_line(epoch: int, num_rounds: int, losses: Mapping[str, float]) -> str:
    words = ", ".join(f"{name}: {value:.4f}" for name, value in losses.items())
    return f"Epoch(val) [{epoch}][{num_rounds}/{num_rounds}]  {words}"


def shown_losses(
    losses: Losses, split: str, weights: Mapping[str, float], num_steps: int | None = None
) -> dict[str, float]:
    """Return the weighted loss and each register's mean: of the latest steps, or of the latest epoch."""
    means = {}
    for name, record in losses[split].items():
        values = record.epoch_means[-1:] if num_steps is None else record.step_means[-num_steps:].tolist()
        finite = [value for value in values if math.isfinite(value)]
        means[name] = sum(finite) / len(finite) if finite else math.nan
    optimised = [
        weights[name] * mean for name, mean in means.items() if losses[split][name].optimize and not math.isnan(mean)
    ]
    return {"loss": sum(optimised) if optimised else math.nan, **means}


def shown_rates(rates: Mapping[str, Mapping[str, float]]) -> str:
    """Return the learning rates in force, those that are alike only once."""
    return "/".join(dict.fromkeys(f"{rate:.3e}" for groups in rates.values() for rate in groups.values()))
