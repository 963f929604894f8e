"""The table of persisted parts: what each commit writes, and how it is read back."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from pipeline.errors import PipelineError
from pipeline.experiment.assembly import Experiment
from pipeline.experiment.records import Records
from pipeline.paths import pool_file
from pipeline.progress import EVALUATION, Progress
from pipeline.runtime.durable import Changes, Writer, json_writer
from pipeline.runtime.safe_loading import load_tensors

_PLAIN = (torch.Tensor, int, float, bool, str, bytes, type(None))


class PersistedParts:
    """Knows which file or folder below ``data/`` belongs to which part of a running experiment."""

    def __init__(self, experiment: Experiment, records: Records) -> None:
        self._experiment, self._components, self._records = experiment, experiment.components, records
        self._num_committed_steps = 0

    def prepared(self) -> Changes:
        """Everything an experiment has before its first stage."""
        counters = {
            f"data_counter_data/{name}": entry.counter.save for name, entry in self._components.data_counters.items()
        }
        frozen = self._pool("frzn", self._components.frozen_modules)
        initial = self._pool("init", self._components.trained_modules)
        last = {path: path.replace("/last/", "/init/") for path in self._last_pool()}
        epochs = self._records.epoch_files("train") | self._records.epoch_files("val")
        return self._policies() | Changes(frozen | initial | epochs, counters, last) | self._optimizers()

    def running_epoch(self) -> Changes:
        """The state inside a training epoch; of its steps only those that are new."""
        first, self._num_committed_steps = self._num_committed_steps, self._records.num_steps
        steps = {f"running/steps_{first:09d}.npz": self._records.segment(first)}
        return Changes(self._last_pool() | steps) | self._optimizers() | self._loss_weighter()

    def trained_epoch(self, epoch: int, committed: Iterable[str]) -> Changes:
        """The state after a training epoch; its steps are sealed and their segments go."""
        self._num_committed_steps = 0
        segments = {path for path in committed if path.startswith("running/")}
        files = self._last_pool() | self._records.epoch_files("train")
        sealed = self._records.step_files(epoch)
        return Changes(files, removed=segments, sealed=sealed) | self._optimizers() | self._loss_weighter()

    def evaluated_epoch(self, epoch: int, pools: list[str], committed: Iterable[str]) -> Changes:
        """The verdicts after an evaluation; pools are new names for the weights of ``last``."""
        weights = {
            name: float(self._components.loss_weighter.get_loss_weight(name)) for name in self._records.losses["val"]
        }
        weight_file = {
            f"loss_weight_data/loss_weights_{epoch}.json": json_writer({"epoch": epoch, "loss_weights": weights})
        }
        same = {path.replace("/last/", f"/{pool}/"): path for path in self._last_pool() for pool in pools}
        dropped = self._outdated_pools({*committed, *same})
        policies = self._policies()
        return Changes(self._records.epoch_files("val"), policies.folders, same, dropped, weight_file, is_partial=True)

    def _outdated_pools(self, committed: set[str]) -> set[str]:
        limit = getattr(self._components.checkpoint_saver, "num_to_keep", None)
        if limit is None:
            return set()
        prefix = "module_ckps/epoch_"
        epochs = sorted({int(path.removeprefix(prefix).split("/")[0]) for path in committed if path.startswith(prefix)})
        outdated = [f"{prefix}{epoch}/" for epoch in epochs[: max(0, len(epochs) - limit)]]
        return {path for path in committed if path.startswith(tuple(outdated))} if outdated else set()

    def _pool(self, pool: str, modules: dict[str, torch.nn.Module]) -> dict[str, Writer]:
        return {
            f"module_ckps/{pool}/{name}.pt": tensor_writer(f"module {name}", module) for name, module in modules.items()
        }

    def _last_pool(self) -> dict[str, Writer]:
        return self._pool("last", self._components.trained_modules)

    def _optimizers(self) -> Changes:
        files = {
            f"optim_ckps/{name}.pt": tensor_writer(f"optimizer {name}", one)
            for name, one in self._experiment.optimizers.items()
        }
        return Changes(files, {f"sched_data/{name}": one.save for name, one in self._experiment.schedulers.items()})

    def _loss_weighter(self) -> Changes:
        return Changes(folders={"loss_weighter_data": self._components.loss_weighter.save})

    def _policies(self) -> Changes:
        names = ("early_stopper", "checkpoint_saver", "loss_weighter")
        return Changes(folders={f"{name}_data": getattr(self._components, name).save for name in names})

    @staticmethod
    def is_needed(path: str) -> bool:
        """Tell whether a resumed run reads a committed file; other pools are for the user."""
        return not path.startswith("module_ckps/") or path.startswith(("module_ckps/last/", "module_ckps/frzn/"))

    def restore_counters(self, data: Path) -> None:
        for name, entry in self._components.data_counters.items():
            entry.counter.load(_existing(data / "data_counter_data" / name))

    def restore(self, data: Path, segments: list[Path], progress: Progress) -> None:
        """Bring every part back to what was committed; the same on every rank."""
        self.restore_counters(data)
        for pool, modules in (("frzn", self._components.frozen_modules), ("last", self._components.trained_modules)):
            for name, module in modules.items():
                module.load_state_dict(load_tensors(pool_file(data, pool, name)))
        for name, optimizer in self._experiment.optimizers.items():
            optimizer.load_state_dict(load_tensors(data / "optim_ckps" / f"{name}.pt"))
            self._experiment.schedulers[name].load(_existing(data / "sched_data" / name))
        for name in ("early_stopper", "checkpoint_saver", "loss_weighter"):
            getattr(self._components, name).load(_existing(data / f"{name}_data"))
        self._restore_records(data, segments, progress)

    def _restore_records(self, data: Path, segments: list[Path], progress: Progress) -> None:
        self._records.load_epochs(data)
        for segment in segments:
            self._records.load_segment(segment)
        self._num_committed_steps = self._records.num_steps
        latest = progress.epoch if progress.stage == EVALUATION else progress.epoch - 1
        if not segments and latest > 0:
            self._records.load_step_files(data, latest)
            self._num_committed_steps = 0


def _existing(folder: Path) -> Path:
    """Return a component's folder; one that saved nothing has none on disk."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def tensor_writer(what: str, owner: Any) -> Writer:
    """Return a writer of an owner's state that can be read back without running code."""

    def write(file: BinaryIO) -> None:
        state = owner.state_dict()
        odd = _first_odd(state)
        if odd is not None:
            raise PipelineError(
                f"The state of {what} must hold tensors and plain values only, but {odd} would not load again.\n"
                "  fix: convert it, for example a numpy number with float(…)."
            )
        torch.save(state, file)

    return write


def _first_odd(value: Any, path: str = "") -> str | None:
    """Return the path and type of the first value that a safe load would refuse."""
    if isinstance(value, dict):
        children: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, (list, tuple)):
        children = enumerate(value)
    else:
        return (
            None
            if type(value) in _PLAIN or isinstance(value, torch.Tensor)
            else f"{path or 'it'} ({type(value).__name__})"
        )
    found = (_first_odd(child, f"{path}[{key!r}]") for key, child in children)
    return next((odd for odd in found if odd is not None), None)
