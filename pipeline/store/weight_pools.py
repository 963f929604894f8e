"""Committed weights as others read them: whole, verified, also while a run commits."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.command_lines import verb_line
from pipeline.distributed.processes import Processes
from pipeline.errors import DamagedResults, PipelineError, UsageError, nearest
from pipeline.paths import CONSTANT, DATA_COUNTER_DATA, MODULE_CKPS, ExperimentPaths
from pipeline.progress import EVALUATION, FINISHED, TRAINING
from pipeline.serialization.sharded_files import Target, load_shards, whole
from pipeline.serialization.torch_files import load_tensors, put_together
from pipeline.store.generations import Generations, matches
from pipeline.store.manifest import Entry, JsonObject, Manifest
from pipeline.store.store import read_current_manifest
from pipeline.system.disk import Digest
from pipeline.system.files import regular_size

# The name of a value of commits.
STEPS_PER_EPOCH = "steps_per_epoch"
FROZEN = "frzn"
_POOLS = f"{MODULE_CKPS}/"
_COUNTERS = f"{DATA_COUNTER_DATA}/"
# A reader that is slower than this many commits in a row gives up.
_MAX_ATTEMPTS = 20
# The files of one module by their names in its folder of shards; a file that is the whole module has no such name. What
# all pools of a module have in common is one more file, or a record that stands for it.
ModuleFiles = dict[str, Entry]
CONSTANT_FILE = f"{CONSTANT}.pt"
CONSTANT_RECORD = f"{CONSTANT}.json"


class CommitSuperseded(PipelineError):
    """A newer commit has taken away a file before it was opened; to be tried again with that commit."""


def newest_commit(paths: ExperimentPaths) -> Manifest:
    """Return the manifest of the current commit, of a running experiment too."""
    # The state and the manifest are two files: a commit may replace one and remove the other in between.
    for _ in range(_MAX_ATTEMPTS):
        if (manifest := read_current_manifest(paths)) is not None:
            return manifest
    raise DamagedResults(
        f"The current commit of {paths.name!r} cannot be read.\n  fix: {verb_line('fsck', paths.name, paths.home)}"
    )


def pool_names(manifest: Manifest) -> list[str]:
    """Return the weight pools of a commit."""
    return sorted({path.split("/")[1] for path in manifest.files if path.startswith(_POOLS)} - {CONSTANT})


def constant_path(module: str, kind: str = CONSTANT_FILE) -> str:
    """Return where the constant parameters of a module are below data/, or the record that stands for them."""
    return f"{_POOLS}{CONSTANT}/{module}{Path(kind).suffix}"


def constant_entries(files: Mapping[str, Entry], module: str) -> ModuleFiles:
    """Return the file of a module's constant parameters, or the record; nothing if the module has neither."""
    paths = {kind: constant_path(module, kind) for kind in (CONSTANT_FILE, CONSTANT_RECORD)}
    return {kind: files[path] for kind, path in paths.items() if path in files}


def damaged_pools(paths: Iterable[str], damaged: Collection[str]) -> set[str]:
    """Return the pools that cannot be read whole; the constant parameters of a module belong to all of its pools."""
    constants = {_module_of(path) for path in damaged if path.startswith(f"{_POOLS}{CONSTANT}/")}
    pools = [path for path in paths if path.startswith(_POOLS)]
    lost = {path.split("/")[1] for path in pools if path in damaged or _module_of(path) in constants}
    return lost - {CONSTANT}


def _module_of(path: str) -> str:
    """Return the module that a file below the pools belongs to."""
    return path.split("/")[2].removesuffix(".pt").removesuffix(".json")


def epoch_of(manifest: Manifest, pool: str) -> int | None:
    """Return the last epoch that a pool's weights have seen whole."""
    if pool == "best":
        best = manifest.run_state.get("best")
        return best.get("epoch") if isinstance(best, dict) else None
    if pool == "last":
        progress = manifest.progress
        return progress.epoch if progress.stage in (EVALUATION, FINISHED) else max(0, progress.epoch - 1)
    number = pool.removeprefix("epoch_")
    return 0 if pool == "init" else int(number) if number.isdigit() else None


def all_steps_of(manifest: Manifest, pool: str, max_steps: int | None) -> int:
    """Return how many steps a pool's weights have taken in all; commits of earlier versions do not know."""
    steps = (epoch_of(manifest, pool) or 0) * int(manifest.run_state.get(STEPS_PER_EPOCH, 0)) + steps_of(manifest, pool)
    return steps if max_steps is None else min(steps, max_steps)


def steps_of(manifest: Manifest, pool: str) -> int:
    """Return how many steps after that epoch a pool's weights have taken."""
    progress = manifest.progress
    return progress.step if pool == "last" and progress.stage == TRAINING else 0


def pool_entries(paths: ExperimentPaths, manifest: Manifest, pool: str) -> dict[str, ModuleFiles]:
    """Return the files of a pool by module, or refuse one that does not exist."""
    prefix = f"{_POOLS}{pool}/"
    modules = dict[str, ModuleFiles]()
    for path, entry in manifest.files.items():
        if path.startswith(prefix):
            module, _, file = path.removeprefix(prefix).partition("/")
            modules.setdefault(module if file else Path(module).stem, {})[file] = entry
    for name, files in modules.items():
        files |= constant_entries(manifest.files, name)
    # An experiment without frozen modules has no such pool, which is not an error.
    if (not modules and pool != FROZEN) or pool == CONSTANT:
        known = [name for name in pool_names(manifest) if name != FROZEN]
        listed = ", ".join(known) or "none"
        raise UsageError(f"{paths.name!r} has no pool {pool!r}; there are {listed}.{nearest(pool, known)}")
    return modules


def counter_entries(manifest: Manifest) -> dict[str, Entry]:
    """Return the files of the data counters by path below data/."""
    return {path: entry for path, entry in manifest.files.items() if path.startswith(_COUNTERS)}


@contextmanager
def open_commit_on_all_ranks(
    paths: ExperimentPaths, processes: Processes, choose: Callable[[Manifest], Iterable[Entry]]
) -> Iterator[tuple[Manifest, HeldFiles]]:
    """Hold the chosen files of one and the same commit open on every process."""
    for attempt in range(1, _MAX_ATTEMPTS + 1):
        manifest = processes.on_rank_zero(newest_commit, paths)
        try:
            # If one rank comes too late for a file, all ranks try again with the newer commit.
            held = processes.on_all_ranks(_open_chosen, paths, manifest, choose)
            break
        except CommitSuperseded:
            if attempt == _MAX_ATTEMPTS:
                raise
    with held:
        yield manifest, held


def _open_chosen(
    paths: ExperimentPaths, manifest: Manifest, choose: Callable[[Manifest], Iterable[Entry]]
) -> HeldFiles:
    return HeldFiles(paths, manifest, choose(manifest))


class HeldFiles:
    """Committed files, open from the beginning: no later commit can take them away before they are read.

    A run that holds the lock opens its files ``lazily``, each when it is read: no other run commits in between, and
    there may be more files than a process can have open.
    """

    def __init__(
        self, paths: ExperimentPaths, manifest: Manifest, entries: Iterable[Entry], *, lazily: bool = False
    ) -> None:
        self._paths = paths
        self._manifest = manifest
        self._lazily = lazily
        self._stored = Generations(paths).stored
        self._files: dict[str, BinaryIO] = {}
        self._intact: set[str] = set()
        with ExitStack() as stack:
            for entry in () if lazily else entries:
                if entry.object not in self._files:
                    self._files[entry.object] = stack.enter_context(self._open(entry))
            self._stack = stack.pop_all()

    def __enter__(self) -> HeldFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()

    def _open(self, entry: Entry) -> BinaryIO:
        path = self._stored(entry)
        try:
            regular_size(path)
            return path.open("rb")
        except OSError as error:
            named = Generations(self._paths).read_current_number()
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.EACCES, errno.ENOMEM):
                raise PipelineError(
                    f"{path} cannot be opened: {error.strerror}.\n"
                    "  fix: restore access, or raise the limit of open files (ulimit -n)."
                ) from error
            if isinstance(error, FileNotFoundError) and named != self._manifest.generation:
                raise CommitSuperseded(f"{path} was replaced by a newer commit again and again; try again.") from error
            raise self._damage(path, error.strerror or str(error)) from error

    def state(self, files: ModuleFiles, target: Target = whole) -> Any:
        """Return what the files of a module hold, once their digests hold; ``target`` is where shards go.

        Where a record stands for constant parameters, these are missing.
        """
        entries = {name: entry for name, entry in files.items() if name != CONSTANT_RECORD}
        opened = {name: self._open_verified(entry) for name, entry in entries.items()}
        stored = self._stored(next(iter(entries.values())))
        try:
            if "" not in opened:
                return load_shards(stored.parent, target, opened)
            state = load_tensors(stored, opened[""])
            if CONSTANT_FILE in opened:
                constant = load_tensors(self._stored(entries[CONSTANT_FILE]), opened[CONSTANT_FILE])
                return put_together(constant, state)
            return state
        finally:
            self._release(entries.values())

    def document(self, entry: Entry) -> JsonObject:
        """Return a committed JSON document, once its digest holds."""
        content = self._open_verified(entry).read()
        self._release([entry])
        value: JsonObject = json.loads(content)
        return value

    def copy(self, entry: Entry, target: Path) -> None:
        """Write a file's content to another place, once its digest holds."""
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(self._open_verified(entry).read())
        self._release([entry])

    def _open_verified(self, entry: Entry) -> BinaryIO:
        """Return an open file at its beginning, once its digest holds."""
        if self._lazily and entry.object not in self._files:
            self._files[entry.object] = self._stack.enter_context(self._open(entry))
        file = self._files[entry.object]
        file.seek(0)
        if entry.object not in self._intact:
            # On the open file: its name may lead elsewhere by now.
            if Digest.of_file(file) != entry.digest:
                raise self._damage(self._stored(entry), "its content is not what was committed")
            self._intact.add(entry.object)
            file.seek(0)
        return file

    def _release(self, entries: Iterable[Entry]) -> None:
        """Close files that can be opened again."""
        for entry in entries if self._lazily else ():
            self._files.pop(entry.object).close()

    def verify(self, entries: Iterable[Entry]) -> None:
        """Compare files with their digests."""
        for entry in entries:
            self._open_verified(entry)
            self._release([entry])

    def trust(self, entries: Iterable[Entry]) -> None:
        """Take files for intact that another process has verified."""
        self._intact |= {entry.object for entry in entries}

    def _damage(self, path: Path, reason: str) -> DamagedResults:
        """Return the error of a file that is damaged; it names the pools that could be used instead."""
        files = self._manifest.files
        damaged = {
            name
            for name, entry in files.items()
            if name.startswith(_POOLS) and not matches(self._stored(entry), entry.digest)
        }
        lost = damaged_pools(files, damaged)
        intact = ", ".join(pool for pool in pool_names(self._manifest) if pool not in lost) or "none"
        return DamagedResults(
            f"{path} is damaged: {reason}. Intact pools of {self._paths.name!r}: {intact}.\n"
            f"  fix: {verb_line('fsck', self._paths.name, self._paths.home)}    (shows from what it can be restored)"
        )
