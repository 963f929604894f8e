"""Ranks compare themselves: at the start, after a restore and before every commit."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from pipeline.checkpoint.parts import PersistedParts
from pipeline.components import Stateful
from pipeline.distributed.agreement import Difference, find_differences
from pipeline.distributed.processes import Processes
from pipeline.experiment.assembly import Experiment
from pipeline.experiment.gradient_flags import GradientFlags
from pipeline.serialization.fingerprint import fingerprint
from pipeline.system.logging import LOGGER
from pipeline.training.engines.base import GradientEngine
from pipeline.training.rank_differences import (
    extra_state_values,
    flag_values,
    layers_with_extra_state,
    module_tensors,
    optimizer_state,
    refuse_differences,
    tensor_values,
)

BROADCAST = "broadcast"
Decisions = Mapping[str, bool]


class RankComparison:
    """Compares what must be equal: tensors by checksums from the device, everything else by its value.

    A difference ends the run, or with ``on_rank_difference: "broadcast"`` is replaced by what rank zero has. One
    process has nothing to compare.
    """

    def __init__(
        self,
        experiment: Experiment,
        processes: Processes,
        engine: GradientEngine,
        parts: PersistedParts,
        scratch: Path,
    ) -> None:
        self._experiment = experiment
        self._processes = processes
        self._engine = engine
        self._parts = parts
        self._scratch = scratch
        self._repairs = experiment.settings.training.on_rank_difference == BROADCAST

    def compare(self, when: str, *, saves: bool = False, is_start: bool = False) -> None:
        """Compare the state of all ranks; with ``saves``, also the files that components would write into a commit.

        Before the first epoch, loss weighters need not know any weights yet.
        """
        if self._processes.world_size == 1:
            return
        values = self._values(saves=saves, is_start=is_start)
        if not self._repairs:
            refuse_differences(self._processes, values, when, self._experiment.components.hooks)
            return
        differences = find_differences(self._processes, values)
        self._log(differences, when)
        if differences:
            self._take_over_from_rank_zero({difference.name for difference in differences})
            values = self._values(saves=saves, is_start=is_start)
            refuse_differences(self._processes, values, f"{when}, after rank 0 was copied")

    def agree(self, decisions: Decisions, when: str) -> Decisions:
        """Return what components have decided, which must be the same on every rank, or else what rank zero decided."""
        if self._repairs:
            self._log(find_differences(self._processes, decisions), when)
            return self._processes.broadcast(decisions)
        refuse_differences(self._processes, decisions, when)
        return decisions

    def _log(self, differences: list[Difference], when: str) -> None:
        if differences and self._processes.is_rank_zero:
            more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
            line = "Ranks are not equal %s: %s%s. All continue with what rank 0 has."
            LOGGER.warning(line, when, differences[0], more)

    def _values(self, *, saves: bool, is_start: bool) -> dict[str, Hashable]:
        # A sharded module that was gathered for an evaluation still shows whole weights.
        self._engine.reshard()
        modules = self._parts.modules()
        states, others = optimizer_state(modules, self._experiment.optimizers)
        # All tensors in one call, so that the host waits for the device once.
        tensors = tensor_values({**module_tensors(modules), **states})
        weighter = self._experiment.components.loss_weighter
        weights = {
            f"loss weight of register {name!r} (loss_weighter.py)": repr(float(weighter.get_loss_weight(name)))
            for name in (() if is_start else self._experiment.settings.register_names)
        }
        values = {
            **tensors,
            **extra_state_values(modules),
            **flag_values(modules),
            **others,
            "the state of the gradient scaler": fingerprint(self._engine.scaler.state_dict()),
            **weights,
        }
        return {**values, **self._saved_values()} if saves else values

    def _saved_values(self) -> dict[str, str]:
        """Return a digest of every file that components save; nothing where one of the ranks has no room for them."""
        values: dict[str, str] = {}
        problem = None
        try:
            with self._scratch_folder() as folder:
                for name, component in self._parts.components().items():
                    for file, content in _read_saved_files(component, folder / name).items():
                        values[f"the file {name}/{file} that save() writes"] = hashlib.sha256(content).hexdigest()
        except OSError as error:
            # A full scratch folder must not end a run whose commits are elsewhere.
            problem = repr(error)
        problems = [other for other in self._processes.gather(problem) if other]
        if problems and self._processes.is_rank_zero:
            LOGGER.warning("What components save is not compared over ranks: %s.", problems[0])
        return {} if problems else values

    def _take_over_from_rank_zero(self, names: set[str]) -> None:
        """Copy rank zero's state to all ranks; of tensors only those that differ."""
        modules = self._parts.modules()
        states, _ = optimizer_state(modules, self._experiment.optimizers)
        tensors = {**module_tensors(modules), **states}
        shapes = {name: (str(tensors[name].dtype), tuple(tensors[name].shape)) for name in tensors if name in names}
        groups = {
            f"the param groups of optimizer {name!r}": repr([group["name"] for group in optimizer.param_groups])
            for name, optimizer in self._experiment.optimizers.items()
        }
        # A broadcast between tensors of different shapes would hang or overwrite memory.
        refuse_differences(self._processes, {**shapes, **groups}, "while rank 0 was copied")
        for name in shapes:
            self._processes.broadcast_tensor(tensors[name])
        if names <= set(tensors):
            return
        # All other state is small: it is taken over whole, whatever of it differs.
        flags = GradientFlags(modules)
        flags.set(self._processes.broadcast(flags.now()))
        for layer in layers_with_extra_state(modules).values():
            layer.set_extra_state(self._processes.broadcast(layer.get_extra_state()))
        for optimizer in self._experiment.optimizers.values():
            # Tensors of the groups were broadcast above; parameters are objects of each rank.
            plain_values = [
                {key: value for key, value in group.items() if key != "params" and not isinstance(value, torch.Tensor)}
                for group in optimizer.param_groups
            ]
            for group, values in zip(optimizer.param_groups, self._processes.broadcast(plain_values), strict=True):
                group.update(values)
        self._engine.scaler.load_state_dict(self._processes.broadcast(self._engine.scaler.state_dict()))
        for name, component in self._parts.components().items():
            with self._scratch_folder() as folder:
                files = _read_saved_files(component, folder / name) if self._processes.is_rank_zero else {}
                loaded = folder / "loaded"
                loaded.mkdir(parents=True)
                for file, content in self._processes.broadcast(files).items():
                    (loaded / file).parent.mkdir(parents=True, exist_ok=True)
                    (loaded / file).write_bytes(content)
                component.load(loaded)

    @contextmanager
    def _scratch_folder(self) -> Iterator[Path]:
        """Yield a folder in the claim of this run, with which it goes if the run is killed."""
        with tempfile.TemporaryDirectory(prefix="compared_", dir=self._processes.broadcast(self._scratch)) as name:
            yield Path(name)


def _read_saved_files(component: Stateful, folder: Path) -> dict[str, bytes]:
    """Let a component save itself into a folder, and return what it wrote, by path."""
    folder.mkdir(parents=True)
    component.save(folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
