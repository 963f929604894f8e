"""Log lines: one shape for every loop, easy to grep."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from pipeline.components import Losses
from pipeline.components.losses import mean
from pipeline.experiment.assembly import Experiment
from pipeline.system.accelerators import memory_in_mb
from pipeline.system.formatting import shown_duration
from pipeline.training.step import StepReport


def step_line(
    epoch: int,
    report: StepReport,
    experiment: Experiment,
    device: torch.device,
    eta_seconds: float,
    losses: Mapping[str, float],
) -> str:
    """Return the line of a training step; a new field is one entry here.

    Example: ``Epoch(train) [3][120/150]  lr: 3.543e-05, eta: 0:13:52, …, loss: 0.1381, grad_norm: 1.4511``.
    """
    fields = {
        "lr": shown_rates(experiment.learning_rates()),
        "eta": shown_duration(eta_seconds),
        "time": f"{report.seconds:.3f}",
        "data_time": f"{report.data_seconds:.3f}",
        "memory": str(memory_in_mb(device)),
    }
    return train_line(epoch, (report.step, report.num_steps), fields, losses, report.outcome.norm)


def train_line(
    epoch: int, place: tuple[int, int], values: Mapping[str, str], losses: Mapping[str, float], norm: float
) -> str:
    """Return the line of a training step from fields that are text already."""
    step, num_steps = place
    # The losses have the names of registers, so they stand behind the fields whose names never change.
    fields = [*(f"{name}: {value}" for name, value in values.items()), *_loss_fields(losses)]
    return f"Epoch(train) [{epoch}][{step}/{num_steps}]  {', '.join([*fields, f'grad_norm: {norm:.4f}'])}"


def val_line(epoch: int, num_rounds: int, losses: Mapping[str, float]) -> str:
    """Return the line of an evaluation, which is logged when it is complete."""
    return f"Epoch(val) [{epoch}][{num_rounds}/{num_rounds}]  {', '.join(_loss_fields(losses))}"


def epoch_line(title: str, losses: Mapping[str, float], *, is_best: bool) -> str:
    """Return the line that a terminal shows of a whole epoch."""
    fields = [f"{name} {value:.4f}" for name, value in losses.items()]
    return f"{title}  {', '.join([*fields, *(['best'] if is_best else [])])}"


def _loss_fields(losses: Mapping[str, float]) -> list[str]:
    return [f"{name}: {value:.4f}" for name, value in losses.items()]


def shown_losses(
    losses: Losses, split: str, weights: Mapping[str, float], num_steps: int | None = None
) -> dict[str, float]:
    """Return the weighted loss and each register's mean: of the latest steps, or of the latest epoch."""
    means = {}
    for name, record in losses[split].items():
        if num_steps is None:
            means[name] = record.epoch_means[-1] if record.epoch_means else math.nan
            continue
        latest = zip(record.step_totals[-num_steps:], record.step_items[-num_steps:], strict=True)
        # A skipped step has no finite value, and must not hide the others.
        finite = [(total, items) for total, items in latest if math.isfinite(total)]
        means[name] = mean(sum(total for total, _ in finite), sum(items for _, items in finite))
    optimised = [
        weights[name] * mean for name, mean in means.items() if losses[split][name].optimize and not math.isnan(mean)
    ]
    return {"loss": sum(optimised) if optimised else math.nan, **means}


def shown_rates(rates: Mapping[str, Mapping[str, float]]) -> str:
    """Return the learning rates in force, equal ones only once."""
    return "/".join(dict.fromkeys(f"{rate:.3e}" for groups in rates.values() for rate in groups.values()))
