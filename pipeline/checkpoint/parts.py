"""The table of persisted parts: what each commit writes, and how it is read back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoint.records import Records
from pipeline.checkpoint.shards import targets_beside, targets_in
from pipeline.checkpoint.snapshots import Snapshots, check_state
from pipeline.distributed.processes import Processes
from pipeline.experiment.assembly import Experiment
from pipeline.experiment.pymodules.definitions import Components
from pipeline.experiment.settings.settings import FSDP
from pipeline.progress import EVALUATION, Progress
from pipeline.serialization.sharded_files import Target, num_bytes
from pipeline.system.disk import Changes, json_writer

# Reads the committed state of a module or an optimizer by its path below data/.
ReadState = Callable[[str, Target], Any]


class PersistedParts:
    """Knows which file or folder below ``data/`` belongs to which part of a running experiment."""

    def __init__(self, experiment: Experiment, records: Records, processes: Processes | None = None) -> None:
        self._experiment = experiment
        self._components = experiment.components
        self._records = records
        self._processes = processes or Processes()
        self.is_sharded = experiment.settings.training.parallelism == FSDP
        self._snapshots = self._new_snapshots()
        self._num_committed_steps = 0
        self._segments: list[int] = []

    def _new_snapshots(self) -> Snapshots:
        return Snapshots(copies=self._experiment.settings.training.checkpoint_in_background)

    def prepared(self) -> Changes:
        """Everything an experiment has before its first stage."""
        counters = {
            f"data_counter_data/{name}": entry.counter.save for name, entry in self._components.data_counters.items()
        }
        # What is frozen is written once: the memory it is copied to goes with this commit.
        frozen = self._pool("frzn", self._components.frozen_modules, self._new_snapshots())
        initial = self._pool("init", self._components.trained_modules)
        last = {path: path.replace("/last/", "/init/") for path in self._last_paths()}
        epochs = self._records.epoch_files("train") | self._records.epoch_files("val")
        return self._policies() | Changes(epochs, counters, last) | frozen | initial | self._optimizers()

    def running_epoch(self) -> Changes:
        """The state inside a training epoch; of its steps only those that are new, and sometimes earlier ones again."""
        first, removed = self._next_segment()
        steps = {_segment_path(first): self._records.segment(first)}
        return Changes(steps, removed=removed) | self._last_pool() | self._optimizers() | self._loss_weighter()

    def _next_segment(self) -> tuple[int, set[str]]:
        """Return the first step of the segment to write, and the segments that it replaces.

        A segment takes in those before it that are not longer, so that there are never many of them: each step is
        written again only when its segment doubles.
        """
        first = self._num_committed_steps
        end = self._records.num_steps
        replaced = []
        while self._segments and first - self._segments[-1] <= end - first:
            first = self._segments.pop()
            replaced.append(first)
        self._segments.append(first)
        self._num_committed_steps = end
        return first, {_segment_path(other) for other in replaced if other != first}

    def trained_epoch(self, epoch: int, committed: Iterable[str]) -> Changes:
        """The state after a training epoch; its steps are sealed and their segments go."""
        self._forget_segments()
        segments = {path for path in committed if path.startswith("running/")}
        records = Changes(self._records.epoch_files("train"), removed=segments, sealed=self._records.step_files(epoch))
        return records | self._last_pool() | self._optimizers() | self._loss_weighter()

    def evaluated_epoch(self, epoch: int, pools: list[str], committed: Iterable[str]) -> Changes:
        """The decisions after an evaluation; pools are new names for the weights of ``last``."""
        weights = {
            name: float(self._components.loss_weighter.get_loss_weight(name)) for name in self._records.losses["val"]
        }
        weight_file = {
            f"loss_weight_data/loss_weights_{epoch}.json": json_writer({"epoch": epoch, "loss_weights": weights})
        }
        same = {path.replace("/last/", f"/{pool}/"): path for path in self._last_paths() for pool in pools}
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

    def _pool(self, pool: str, modules: dict[str, torch.nn.Module], snapshots: Snapshots | None = None) -> Changes:
        owners = {self._path(f"module_ckps/{pool}/{name}"): one for name, one in modules.items()}
        return self._taken("module", owners, snapshots or self._snapshots)

    def _path(self, path: str) -> str:
        return path if self.is_sharded else f"{path}.pt"

    def _last_paths(self) -> list[str]:
        return [self._path(f"module_ckps/last/{name}") for name in self._components.trained_modules]

    def _last_pool(self) -> Changes:
        return self._pool("last", self._components.trained_modules)

    def _optimizers(self) -> Changes:
        states = {self._path(f"optim_ckps/{name}"): one for name, one in self._experiment.optimizers.items()}
        schedulers = {folder: one.save for folder, one in self._schedulers().items()}
        return self._taken("optimizer", states, self._snapshots) | Changes(folders=schedulers)

    def _taken(self, kind: str, owners: Mapping[str, Any], snapshots: Snapshots) -> Changes:
        """Take snapshots of modules or optimizers, by path; shards are written later, by all processes."""
        if self.is_sharded:
            return Changes(shards=tuple(owners), num_bytes=sum(num_bytes(one.state_dict()) for one in owners.values()))
        taken = {path: snapshots.take(f"{kind} {Path(path).stem}", owner) for path, owner in owners.items()}
        files = {path: writer for path, (writer, _) in taken.items()}
        return Changes(files, num_bytes=sum(size for _, size in taken.values()))

    def write_shards(self, folders: Mapping[str, Path]) -> None:
        """Fill the folders of a commit that has begun, together with all other processes."""
        from pipeline.serialization.dcp_writer import save_shards

        states = {folder: self._owner(path).state_dict() for path, folder in folders.items()}
        for folder, state in states.items():
            check_state(folder.name, state)
        save_shards(states, self._processes)

    def _owner(self, path: str) -> Any:
        """Return the module or the optimizer that a folder of shards belongs to."""
        owners = self._components.all_modules if path.startswith("module_ckps/") else self._experiment.optimizers
        return owners[Path(path).name]

    def _loss_weighter(self) -> Changes:
        return Changes(folders={"loss_weighter_data": self._components.loss_weighter.save})

    def _policies(self) -> Changes:
        return Changes(folders={folder: one.save for folder, one in self._policy_components().items()})

    def _policy_components(self) -> dict[str, Any]:
        names = ("early_stopper", "checkpoint_saver", "loss_weighter")
        return {f"{name}_data": getattr(self._components, name) for name in names}

    def _schedulers(self) -> dict[str, Any]:
        return {f"sched_data/{name}": one for name, one in self._experiment.schedulers.items()}

    def components(self) -> dict[str, Any]:
        """Return every component whose state changes during training, by its folder below data/."""
        return self._schedulers() | self._policy_components()

    @staticmethod
    def is_needed(path: str) -> bool:
        """Return whether a resumed run reads a committed file; other pools are for the user."""
        return not path.startswith("module_ckps/") or path.startswith(("module_ckps/last/", "module_ckps/frzn/"))

    def restore(self, read_state: ReadState, folder: Path, progress: Progress) -> None:
        """Bring every part back to what was committed; the same on every rank.

        ``folder`` has a copy of the committed files that are not weights, under their names below data/.
        """
        restore_counters(self._components, folder)
        for pool, modules in (("frzn", self._components.frozen_modules), ("last", self._components.trained_modules)):
            for name, module in modules.items():
                module.load_state_dict(read_state(self._path(f"module_ckps/{pool}/{name}"), targets_in(module)))
        for name, optimizer in self._experiment.optimizers.items():
            optimizer.load_state_dict(read_state(self._path(f"optim_ckps/{name}"), targets_beside(optimizer)))
        for path, component in self.components().items():
            component.load(_existing(folder / path))
        self._restore_records(folder, sorted(folder.glob("running/*.npz")), progress)

    def _restore_records(self, data: Path, segments: list[Path], progress: Progress) -> None:
        self._records.load_epochs(data)
        for segment in segments:
            self._records.load_segment(segment)
        self._segments = [int(segment.stem.split("_")[1]) for segment in segments]
        self._num_committed_steps = self._records.num_steps
        latest = progress.epoch if progress.stage == EVALUATION else progress.epoch - 1
        if not segments and latest > 0:
            self._records.load_step_files(data, latest)
            self._forget_segments()

    def _forget_segments(self) -> None:
        self._num_committed_steps = 0
        self._segments = []


def is_counted(path: str) -> bool:
    """Return whether a committed file is what a data counter saved."""
    return path.startswith("data_counter_data/")


def restore_counters(components: Components, data: Path) -> None:
    """Let every data counter load what it saved."""
    for name, entry in components.data_counters.items():
        entry.counter.load(_existing(data / "data_counter_data" / name))


def _segment_path(first: int) -> str:
    return f"running/steps_{first:09d}.npz"


def _existing(folder: Path) -> Path:
    """Return a component's folder; one that saved nothing has none on disk."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder
