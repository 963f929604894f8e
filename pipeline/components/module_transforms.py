"""Module transforms: run the modules on a batch and return its losses."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from pipeline.components.position import Position


class BaseModuleTransform:
    """Runs the modules on a batch of one dataset and returns ``{register: losses}``, one value per item.

    A loss that couples all rows of a step, such as SimCLR's, takes two methods in place of ``__call__``:
    ``embed(batch, modules)`` returns ``{name: rows}``, one row per item, and ``loss(rows, modules)`` gets those of all
    batches of the step and returns ``{register: losses}``, one value per row.

    The same object serves training and evaluation; ``module.training`` distinguishes them. More methods are optional:
    Of a file that names ``metrics``, evaluations also need what their updates take, under the name of each.
    ``count_items(batch)`` returns ``{register: count}`` where the data decides how many items a batch has;
    ``predict(batch, modules)`` returns ``{name: values}``, one entry per item, for ``evaluate --out``;
    ``images(batch, modules)`` returns ``{name: image}`` for people to look at; ``artifacts(batch, modules, folder)``
    writes files into a folder, which become part of the results.

    ``position`` is that of the batch, the same on every rank; ``count_items`` runs when a batch is loaded and has none.
    """

    position: Position | None = None

    def __init__(self, data_counters: dict[str, Any], device: torch.device, logger: logging.Logger) -> None:
        self.data_counters = data_counters
        self.device = device
        self.logger = logger

    # What a batch is depends on the author's collate_fn.
    def __call__(self, batch: Any, modules: dict[str, nn.Module]) -> dict[str, torch.Tensor]:
        raise TypeError(f"{type(self).__name__} must define __call__(batch, modules), or embed and loss.")
