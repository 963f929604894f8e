"""The table of persisted parts: what each commit writes, and how it is read back.

A part that must survive a kill is one row of this table: a folder or a file of tensors (``_rows``), or a small value
in the manifest (``RunValue``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from pipeline.checkpoint.records import Records
from pipeline.checkpoint.shards import targets_beside, targets_in
from pipeline.checkpoint.snapshots import Snapshots, check_state
from pipeline.distributed.processes import Processes
from pipeline.experiment.assembly import Experiment
from pipeline.experiment.pymodules.definitions import Components
from pipeline.experiment.settings.settings import FSDP
from pipeline.paths import DATA_COUNTER_DATA, LOSS_WEIGHT_DATA, MODULE_CKPS, OPTIM_CKPS, RUNNING_STEPS, SCHED_DATA
from pipeline.progress import EVALUATION, Progress
from pipeline.serialization.sharded_files import Target, num_bytes
from pipeline.store.changes import Changes
from pipeline.system.disk import json_writer

# Reads the committed state of a module or an optimizer by its path below data/.
ReadState = Callable[[str, Target], Any]


class Moment(Enum):
    """The kinds of commits."""

    PREPARED = auto()
    IN_EPOCH = auto()
    AFTER_TRAINING = auto()
    AFTER_EVALUATION = auto()


_ONCE = frozenset({Moment.PREPARED})
_TRAINED = frozenset({Moment.IN_EPOCH, Moment.AFTER_TRAINING})
_JUDGED = frozenset({Moment.PREPARED, Moment.AFTER_EVALUATION})


@dataclass(frozen=True)
class Part:
    """One row: where it is below data/, whose state it is, and which commits write it.

    The owner of tensors has ``state_dict`` and ``load_state_dict``; any other saves and loads a folder of its own.
    """

    path: str
    owner: Any
    written_at: frozenset[Moment]
    has_tensors: bool = False
    is_restored: bool = True


@dataclass(frozen=True)
class RunValue:
    """A small value in the manifest. With ``has_default``, commits of earlier versions may lack it."""

    name: str
    save: Callable[[], Any]
    load: Callable[[Any], None]
    has_default: bool = False


class PersistedParts:
    """The parts of a running experiment, saved and restored together."""

    def __init__(self, experiment: Experiment, records: Records, processes: Processes | None = None) -> None:
        self._experiment = experiment
        self._components = experiment.components
        self._records = records
        self._processes = processes or Processes()
        self.is_sharded = experiment.settings.training.parallelism == FSDP
        # Added where the objects are built whose values they are.
        self.run_values: list[RunValue] = []
        self._snapshots = self._new_snapshots()
        self._num_committed_steps = 0
        self._segments: list[int] = []

    @cached_property
    def _table(self) -> list[Part]:
        return list(self._rows())

    def _rows(self) -> Iterator[Part]:
        components = self._components
        for name, entry in components.data_counters.items():
            yield Part(f"{DATA_COUNTER_DATA}/{name}", entry.counter, _ONCE)
        for name, module in components.frozen_modules.items():
            yield Part(self._path(f"{MODULE_CKPS}/frzn/{name}"), module, _ONCE, has_tensors=True)
        for name, module in components.trained_modules.items():
            yield Part(self._path(f"{MODULE_CKPS}/init/{name}"), module, _ONCE, has_tensors=True, is_restored=False)
            # The first commit has it as another name of the initial weights.
            yield Part(self._path(f"{MODULE_CKPS}/last/{name}"), module, _TRAINED, has_tensors=True)
        for name, optimizer in self._experiment.optimizers.items():
            yield Part(self._path(f"{OPTIM_CKPS}/{name}"), optimizer, _ONCE | _TRAINED, has_tensors=True)
        for name, scheduler in self._experiment.schedulers.items():
            yield Part(f"{SCHED_DATA}/{name}", scheduler, _ONCE | _TRAINED)
        yield Part("early_stopper_data", components.early_stopper, _JUDGED)
        yield Part("checkpoint_saver_data", components.checkpoint_saver, _JUDGED)
        yield Part("loss_weighter_data", components.loss_weighter, _JUDGED | _TRAINED)

    def _new_snapshots(self) -> Snapshots:
        return Snapshots(copies=self._experiment.settings.training.checkpoint_in_background)

    def _path(self, path: str) -> str:
        """Return where tensors are: in a file, or in a folder of shards."""
        return path if self.is_sharded else f"{path}.pt"

    def _rows_at(self, moment: Moment) -> Changes:
        """Return what the rows of the table write in a commit of this kind."""
        rows = [part for part in self._table if moment in part.written_at]
        folders = {part.path: part.owner.save for part in rows if not part.has_tensors}
        owners = {part.path: part.owner for part in rows if part.has_tensors}
        if self.is_sharded:
            # Shards are written later, by all processes.
            size = sum(num_bytes(owner.state_dict()) for owner in owners.values())
            return Changes(folders=folders, shards=tuple(owners), num_bytes=size)
        # Frozen modules are written once: the memory they are copied to goes with that commit.
        frozen = set(map(id, self._components.frozen_modules.values()))
        passing = self._new_snapshots()
        taken = {}
        for path, owner in owners.items():
            kind = "optimizer" if isinstance(owner, Optimizer) else "module"
            snapshots = passing if id(owner) in frozen else self._snapshots
            taken[path] = snapshots.take(f"{kind} {Path(path).stem}", owner)
        files = {path: writer for path, (writer, _) in taken.items()}
        return Changes(files, folders, num_bytes=sum(size for _, size in taken.values()))

    def prepared(self) -> Changes:
        """Everything an experiment has before its first stage."""
        last = {path: path.replace("/last/", "/init/") for path in self._last_paths()}
        epochs = self._records.epoch_files("train") | self._records.epoch_files("val")
        return Changes(epochs, same_as=last) | self._rows_at(Moment.PREPARED)

    def running_epoch(self) -> Changes:
        """The state inside a training epoch; of its steps only those that are new, and sometimes earlier ones again."""
        first, removed = self._next_segment()
        steps = {_segment_path(first): self._records.segment(first)}
        return Changes(steps, removed=removed) | self._rows_at(Moment.IN_EPOCH)

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
        segments = {path for path in committed if path.startswith(f"{RUNNING_STEPS}/")}
        records = Changes(self._records.epoch_files("train"), removed=segments, sealed=self._records.step_files(epoch))
        return records | self._rows_at(Moment.AFTER_TRAINING)

    def evaluated_epoch(self, epoch: int, pools: list[str], committed: Iterable[str]) -> Changes:
        """The decisions after an evaluation; pools are new names for the weights of ``last``."""
        weights = {
            name: float(self._components.loss_weighter.get_loss_weight(name)) for name in self._records.losses["val"]
        }
        weight_file = {
            f"{LOSS_WEIGHT_DATA}/loss_weights_{epoch}.json": json_writer({"epoch": epoch, "loss_weights": weights})
        }
        same = {path.replace("/last/", f"/{pool}/"): path for path in self._last_paths() for pool in pools}
        dropped = self._outdated_pools({*committed, *same})
        judged = self._rows_at(Moment.AFTER_EVALUATION)
        return Changes(self._records.epoch_files("val"), judged.folders, same, dropped, weight_file, is_partial=True)

    def _outdated_pools(self, committed: set[str]) -> set[str]:
        limit = getattr(self._components.checkpoint_saver, "num_to_keep", None)
        if limit is None:
            return set()
        prefix = f"{MODULE_CKPS}/epoch_"
        epochs = sorted({int(path.removeprefix(prefix).split("/")[0]) for path in committed if path.startswith(prefix)})
        outdated = [f"{prefix}{epoch}/" for epoch in epochs[: max(0, len(epochs) - limit)]]
        return {path for path in committed if path.startswith(tuple(outdated))} if outdated else set()

    def _last_paths(self) -> list[str]:
        return [self._path(f"{MODULE_CKPS}/last/{name}") for name in self._components.trained_modules]

    def write_shards(self, folders: Mapping[str, Path]) -> None:
        """Fill the folders of a commit that has begun, together with all other processes."""
        from pipeline.serialization.dcp_writer import save_shards

        owners = {part.path: part.owner for part in self._table}
        states = {folder: owners[path].state_dict() for path, folder in folders.items()}
        for folder, state in states.items():
            check_state(folder.name, state)
        save_shards(states, self._processes)

    def components(self) -> dict[str, Any]:
        """Return every component whose state changes during training, by its folder below data/."""
        return {part.path: part.owner for part in self._table if not part.has_tensors and part.written_at != _ONCE}

    def save_run_values(self) -> dict[str, Any]:
        """Return the small values of a commit, by name."""
        return {value.name: value.save() for value in self.run_values}

    def load_run_values(self, saved: Mapping[str, Any]) -> None:
        """Give the small values of a commit back to their owners; earlier versions lack some of them."""
        for value in self.run_values:
            if value.name in saved or not value.has_default:
                value.load(saved[value.name])

    @staticmethod
    def is_needed(path: str) -> bool:
        """Return whether a resumed run reads a committed file; other pools are for the user."""
        return not path.startswith(f"{MODULE_CKPS}/") or path.startswith(
            (f"{MODULE_CKPS}/last/", f"{MODULE_CKPS}/frzn/")
        )

    def restore(self, read_state: ReadState, folder: Path, progress: Progress) -> None:
        """Bring every part back to what was committed; the same on every rank.

        ``folder`` has a copy of the committed files that are not weights, under their names below data/.
        """
        for part in self._table:
            if part.is_restored and part.has_tensors:
                is_optimizer = isinstance(part.owner, Optimizer)
                target = targets_beside(part.owner) if is_optimizer else targets_in(part.owner)
                part.owner.load_state_dict(read_state(part.path, target))
            elif part.is_restored:
                part.owner.load(_existing(folder / part.path))
        self._restore_records(folder, sorted(folder.glob(f"{RUNNING_STEPS}/*.npz")), progress)

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
    return path.startswith(f"{DATA_COUNTER_DATA}/")


def restore_counters(components: Components, data: Path) -> None:
    """Let every data counter load what it saved."""
    for name, entry in components.data_counters.items():
        entry.counter.load(_existing(data / DATA_COUNTER_DATA / name))


def _segment_path(first: int) -> str:
    return f"{RUNNING_STEPS}/steps_{first:09d}.npz"


def _existing(folder: Path) -> Path:
    """Return a component's folder; one that saved nothing has none on disk."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder
