"""The table of persisted parts: what each commit writes, and how it is read back.

A part that must survive a kill is one row: a folder in ``_folder_parts``, or tensors in ``_tensor_parts``. From the row
follow what commits write, what a resume verifies and restores, shards, and the comparison of ranks. Small JSON values
are rows of ``run_values``, which ``session.build_session`` fills.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from torch import nn
from torch.optim import Optimizer

from pipeline.checkpoint.committed_files import CommittedFiles
from pipeline.checkpoint.constants import Constants
from pipeline.checkpoint.records import Records
from pipeline.checkpoint.snapshots import Snapshots, check_state, target_in
from pipeline.components import Stateful
from pipeline.distributed.processes import Processes
from pipeline.errors import DamagedResults
from pipeline.experiment.assembly import Experiment
from pipeline.experiment.pymodules.definitions import Components
from pipeline.paths import (
    ARTIFACTS,
    CHECKPOINT_SAVER_DATA,
    DATA_COUNTER_DATA,
    EARLY_STOPPER_DATA,
    HOOK_DATA,
    LOSS_WEIGHT_DATA,
    LOSS_WEIGHTER_DATA,
    MODULE_CKPS,
    OPTIM_CKPS,
    RUNNING_STEPS,
    SCHED_DATA,
)
from pipeline.progress import EVALUATION, Progress
from pipeline.serialization.sharded_files import num_bytes
from pipeline.serialization.torch_files import put_together
from pipeline.store.changes import Changes
from pipeline.store.weight_pools import FROZEN
from pipeline.system.disk import bytes_writer, json_writer


class Moment(Enum):
    """The kinds of commits, by when they are made; NOT_EVALUATED is epoch 0 of a run without evaluations."""

    PREPARED = auto()
    NOT_EVALUATED = auto()
    IN_EPOCH = auto()
    AFTER_TRAINING = auto()
    AFTER_EVALUATION = auto()


Owner = TypeVar("Owner")

_ONCE = frozenset({Moment.PREPARED})
_TRAINED = frozenset({Moment.IN_EPOCH, Moment.AFTER_TRAINING})
_JUDGED = frozenset({Moment.AFTER_EVALUATION})
# Pools of weights for the user: another name of "last" at some moment. A resume reads all other tensors.
_USER_POOLS = (f"{MODULE_CKPS}/init/", f"{MODULE_CKPS}/best/", f"{MODULE_CKPS}/epoch_")


@dataclass(frozen=True)
class Part(Generic[Owner]):
    """One row: where it is below data/, whose state it is, and which commits write it."""

    path: str
    owner: Owner
    written_at: frozenset[Moment]
    is_restored: bool = True
    # A part that earlier versions did not have keeps its initial state when their results are continued.
    has_default: bool = False
    # The module whose constant parameters this file leaves out, unless their values have changed.
    module: str = ""


# Saves and loads a folder of its own.
FolderPart = Part[Stateful]
# Saved as one file of tensors, or as shards that every rank writes.
TensorPart = Part[nn.Module | Optimizer]


@dataclass(frozen=True)
class RunValue:
    """A small JSON value in the manifest.

    With ``has_default``, commits of earlier versions may lack it and nothing is loaded; with ``missing``, that value is
    loaded instead. One that ``precedes_tensors`` decides which tensors there are, so it is loaded before them.
    """

    name: str
    save: Callable[[], object]
    load: Callable[[Any], None]
    has_default: bool = False
    missing: object = None
    precedes_tensors: bool = False


class PersistedParts:
    """The parts of a running experiment, saved and restored together."""

    def __init__(self, experiment: Experiment, records: Records, processes: Processes | None = None) -> None:
        self._experiment = experiment
        self._components = experiment.components
        self._records = records
        self._processes = processes or Processes()
        # Also with one process, whose modules are whole: the format of the files must not depend on the processes.
        self.writes_shards = experiment.settings.training.shards_modules
        # Filled by build_session, which has the objects whose values they are.
        self.run_values: list[RunValue] = []
        self._copies = experiment.settings.training.checkpoint_in_background
        self._snapshots = Snapshots(copies=self._copies)
        self._constants = Constants(experiment, copies=self._copies)
        # The running epoch's steps are committed in segments: how many steps, and where each segment begins.
        self._num_committed_steps = 0
        self._segments: list[int] = []

    @cached_property
    def _folder_parts(self) -> list[FolderPart]:
        """The rows of what saves a folder; a new component that must survive a kill is one more."""
        components = self._components
        counters = components.data_counters.items()
        schedulers = self._experiment.schedulers.items()
        return [
            *(FolderPart(f"{DATA_COUNTER_DATA}/{name}", entry.counter, _ONCE) for name, entry in counters),
            *(FolderPart(f"{SCHED_DATA}/{name}", scheduler, _ONCE | _TRAINED) for name, scheduler in schedulers),
            *(FolderPart(f"{HOOK_DATA}/{name}", hook, _ONCE | _TRAINED) for name, hook in components.hooks.items()),
            FolderPart(EARLY_STOPPER_DATA, components.early_stopper, _ONCE | _JUDGED),
            FolderPart(CHECKPOINT_SAVER_DATA, components.checkpoint_saver, _ONCE | _JUDGED),
            FolderPart(LOSS_WEIGHTER_DATA, components.loss_weighter, _ONCE | _JUDGED | _TRAINED),
        ]

    @cached_property
    def _tensor_parts(self) -> list[TensorPart]:
        """The rows of what has a state dict; more tensors that must survive a kill are one more."""
        frozen = self._components.frozen_modules.items()
        trained = self._components.changing_modules.items()
        averages = self._components.averages
        optimizers = self._experiment.optimizers.items()
        return [
            *(TensorPart(self._path(FROZEN, name), module, _ONCE, module=name) for name, module in frozen),
            *(
                TensorPart(self._path("init", name), module, _ONCE, is_restored=False, module=name)
                for name, module in trained
            ),
            # The first commit has them as other names of the initial weights.
            *(
                TensorPart(
                    self._path("last", name),
                    module,
                    # An evaluation computes its BatchNorm statistics.
                    _TRAINED | _JUDGED if name in averages and averages[name].update_bn else _TRAINED,
                    module=name,
                )
                for name, module in trained
            ),
            *(
                TensorPart(self._with_suffix(f"{OPTIM_CKPS}/{name}"), optimizer, _ONCE | _TRAINED)
                for name, optimizer in optimizers
            ),
        ]

    def _path(self, pool: str, module: str) -> str:
        return self._with_suffix(f"{MODULE_CKPS}/{pool}/{module}")

    def _with_suffix(self, path: str) -> str:
        """Return where tensors are: in a file, or in a folder of shards."""
        return path if self.writes_shards else f"{path}.pt"

    def _rows_at(self, moment: Moment) -> Changes:
        """Return what the rows of the table write in a commit of this kind."""
        folders: dict[str, Callable[[Path], None]] = {
            part.path: part.owner.save for part in self._folder_parts if moment in part.written_at
        }
        rows = [part for part in self._tensor_parts if moment in part.written_at]
        if self.writes_shards:
            # Shards are written later, by all ranks.
            size = sum(num_bytes(part.owner.state_dict()) for part in rows)
            return Changes(folders=folders, shards=tuple(part.path for part in rows), num_bytes=size)
        # Frozen modules are written once: their copy is freed after that commit.
        frozen = set(map(id, self._components.frozen_modules.values()))
        one_time_snapshots = Snapshots(copies=self._copies)
        files = {}
        total_bytes = 0
        for part in rows:
            kind = "optimizer" if isinstance(part.owner, Optimizer) else "module"
            snapshots = one_time_snapshots if id(part.owner) in frozen else self._snapshots
            left_out = self._constants.unchanged(part.module) if part.module else ()
            files[part.path], size = snapshots.take(f"{kind} {Path(part.path).stem}", part.owner, left_out)
            total_bytes += size
        return Changes(files, folders, num_bytes=total_bytes)

    def choose_constants(self) -> None:
        """Note which parameters are constant, before hooks may change them: what they change is saved with the rest."""
        self._constants.begin()

    def initial_state(self) -> Changes:
        """Everything an experiment has before its first stage."""
        last = {self._path("last", name): self._path("init", name) for name in self._components.changing_modules}
        epochs = self._records.epoch_files("train") | self._records.epoch_files("val")
        # Before the rows, which leave out what these files hold.
        constants = self._constants.begin()
        return Changes(epochs, same_as=last) | constants | self._rows_at(Moment.PREPARED)

    def running_epoch(self) -> Changes:
        """The state inside a training epoch; of its steps only those that are new, and sometimes earlier ones again."""
        first, removed = self._next_segment()
        steps = {_segment_path(first): self._records.segment(first)}
        return Changes(steps, removed=removed) | self._rows_at(Moment.IN_EPOCH)

    def _next_segment(self) -> tuple[int, set[str]]:
        """Return the first step of the segment to write, and the segments that it replaces."""
        first = self._num_committed_steps
        end = self._records.num_steps
        # A segment takes in those before it that are not longer, so that there are never many of them: each step is
        # written again only when its segment doubles.
        replaced = []
        while self._segments and first - self._segments[-1] <= end - first:
            first = self._segments.pop()
            replaced.append(first)
        self._segments.append(first)
        self._num_committed_steps = end
        return first, {_segment_path(start) for start in replaced if start != first}

    def trained_epoch(self, epoch: int, committed: Iterable[str]) -> Changes:
        """The state after a training epoch; its steps are sealed and their segments go."""
        self._forget_segments()
        segments = {path for path in committed if path.startswith(f"{RUNNING_STEPS}/")}
        records = Changes(self._records.epoch_files("train"), removed=segments, sealed=self._records.step_files(epoch))
        return records | self._rows_at(Moment.AFTER_TRAINING)

    def evaluated_epoch(
        self,
        epoch: int,
        pools: list[str],
        committed: Iterable[str],
        artifacts: Mapping[str, bytes] = MappingProxyType({}),
    ) -> Changes:
        """The decisions after an evaluation; pools are new names for the weights of ``last``."""
        weighter = self._components.loss_weighter
        weights = {name: float(weighter.get_loss_weight(name)) for name in self._experiment.settings.register_names}
        sealed = {
            f"{LOSS_WEIGHT_DATA}/loss_weights_{epoch}.json": json_writer({"epoch": epoch, "loss_weights": weights}),
            **{f"{ARTIFACTS}/{path}": bytes_writer(content) for path, content in artifacts.items()},
        }
        trained = self._components.changing_modules
        pooled = {self._path(pool, name): self._path("last", name) for name in trained for pool in pools}
        removed: set[str] = set()
        limit = getattr(self._components.checkpoint_saver, "num_to_keep", None)
        if limit is not None:
            # Only pools of epochs are limited; "best" and the user's own names stay.
            prefix = f"{MODULE_CKPS}/epoch_"
            paths = [path for path in {*committed, *pooled} if path.startswith(prefix)]
            epoch_of = {path: int(path.removeprefix(prefix).split("/")[0]) for path in paths}
            epochs = sorted(set(epoch_of.values()))
            outdated = epochs[: max(0, len(epochs) - limit)]
            removed = {path for path in paths if epoch_of[path] in outdated}
        decisions = self._rows_at(Moment.AFTER_EVALUATION)
        # Without tensors of its own, this commit shares its most important files with the one before.
        decisions.is_partial = not decisions.files and not decisions.shards
        files = self._records.epoch_files("val")
        return decisions | Changes(files, same_as=pooled, removed=removed, sealed=sealed, is_partial=True)

    def write_shards(self, folders: Mapping[str, Path]) -> None:
        """Fill the folders of a commit that has begun, together with all other ranks."""
        # Imported here: torch's distributed checkpoint takes long to import, and few runs are sharded.
        from pipeline.serialization.dcp_writer import save_shards

        owners = {part.path: part.owner for part in self._tensor_parts}
        states = {folder: owners[path].state_dict() for path, folder in folders.items()}
        for folder, state in states.items():
            check_state(folder.name, state)
        save_shards(states, self._processes)

    def modules(self) -> dict[str, nn.Module]:
        """Return every module whose tensors are committed: those of the experiment by name, any other by its path."""
        named = dict(self._components.all_modules)
        known = set(map(id, named.values()))
        for part in self._tensor_parts:
            if isinstance(part.owner, nn.Module) and id(part.owner) not in known:
                named[part.path] = part.owner
        return named

    def components(self) -> dict[str, Stateful]:
        """Return every component whose state changes during training, by its folder below data/."""
        return {part.path: part.owner for part in self._folder_parts if part.written_at != _ONCE}

    def save_run_values(self) -> dict[str, object]:
        """Return the small values of a commit, by name."""
        return {value.name: value.save() for value in self.run_values}

    def prepare_tensors(self, saved: Mapping[str, object]) -> None:
        """Load those small values of a commit that decide which tensors there are."""
        self._load_values([value for value in self.run_values if value.precedes_tensors], saved)

    def load_run_values(self, saved: Mapping[str, object]) -> None:
        """Give the other small values of a commit back to their owners."""
        self._load_values([value for value in self.run_values if not value.precedes_tensors], saved)

    @staticmethod
    def _load_values(values: Iterable[RunValue], saved: Mapping[str, object]) -> None:
        for value in values:
            if value.name in saved or value.missing is not None:
                value.load(saved.get(value.name, value.missing))
            elif not value.has_default:
                raise DamagedResults(f"The current commit lacks {value.name!r}, which a run cannot continue without.")

    @staticmethod
    def is_needed(path: str) -> bool:
        """Return whether a resumed run reads a committed file; pools of weights are for the user."""
        return not path.startswith(_USER_POOLS)

    def restore(self, files: CommittedFiles, progress: Progress) -> None:
        """Bring every part back to what was committed; the same on every rank."""
        for part in self._tensor_parts:
            is_new = part.has_default and not files.has(part.path)
            if part.is_restored and not is_new:
                constants = self._constants.load(part.module, files) if part.module else {}
                state = files.read_state(part.path, target_in(part.owner))
                part.owner.load_state_dict(put_together(constants, state))
        # After the tensors: a scheduler may look at the learning rates of its optimizer.
        folder = files.folder
        for component in self._folder_parts:
            # One that saved nothing has no folder on disk, and must load all the same.
            if not component.has_default or (folder / component.path).exists():
                component.owner.load(_make_folder(folder / component.path))
        self._records.load_epochs(folder)
        segments = sorted(folder.glob(f"{RUNNING_STEPS}/*.npz"))
        for segment in segments:
            self._records.load_segment(segment)
        self._segments = [int(segment.stem.split("_")[1]) for segment in segments]
        self._num_committed_steps = self._records.num_steps
        # Between two epochs, the steps of the latest finished one stay visible to components and trackers.
        latest = progress.epoch if progress.stage == EVALUATION else progress.epoch - 1
        if not segments and latest > 0:
            self._records.load_step_files(folder, latest)
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
        entry.counter.load(_make_folder(data / DATA_COUNTER_DATA / name))


def _segment_path(first: int) -> str:
    return f"{RUNNING_STEPS}/steps_{first:09d}.npz"


def _make_folder(folder: Path) -> Path:
    """Return a component's folder, made if need be: one that saved nothing has none on disk."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder
