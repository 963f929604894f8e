"""What a continuing run reads of the current commit, by names that no commit ever replaces.

A network file system may serve an old version of a name for a while. Files below ``generations/`` have names of their
own, and every rank compares what it reads with the digests that rank zero found in the manifest.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.distributed.processes import Processes
from pipeline.errors import DamagedResults, PipelineError, UnreadableFile
from pipeline.paths import MODULE_CKPS, OPTIM_CKPS, ExperimentPaths
from pipeline.serialization.sharded_files import Target, whole
from pipeline.store.manifest import Entry, JsonObject, Manifest
from pipeline.store.weight_pools import (
    CONSTANT_FILE,
    CONSTANT_RECORD,
    CommitSuperseded,
    HeldFiles,
    ModuleFiles,
    constant_entries,
    constant_path,
)

_STATES = (f"{MODULE_CKPS}/", f"{OPTIM_CKPS}/")


@dataclass(frozen=True)
class CommitToRead:
    """What all ranks read, chosen by rank 0: a commit, its files by path below data/, and a folder for copies."""

    manifest: Manifest
    files: Mapping[str, Entry]
    scratch: Path


class CommittedFiles:
    """The files of a commit, open and verified; ``folder`` has copies of all but modules and optimizers."""

    def __init__(
        self, paths: ExperimentPaths, commit: CommitToRead, held: HeldFiles, folder: Path, processes: Processes
    ) -> None:
        self._paths = paths
        self._commit = commit
        self._held = held
        self._processes = processes
        self.folder = folder

    def has(self, path: str) -> bool:
        """Return whether the commit has the state of a module or an optimizer."""
        return any(name == path or name.startswith(f"{path}/") for name in self._commit.files)

    def read_state(self, path: str, target: Target) -> dict[str, Any]:
        """Return what a module or an optimizer was; of shards, ``target`` says where those of this rank go."""
        prefix = path + "/"
        files: ModuleFiles = {
            name.removeprefix(prefix) if name != path else "": entry
            for name, entry in self._commit.files.items()
            if name == path or name.startswith(prefix)
        }
        if not files:
            raise UnreadableFile(f"{path} is not part of commit {self._commit.manifest.generation}.")
        return self._read(path, files, target)

    def read_constants(self, module: str) -> dict[str, Any] | None:
        """Return the constant parameters of a module, or None if the commit has no file of them."""
        files = constant_entries(self._commit.files, module)
        if CONSTANT_FILE not in files:
            return None
        return self._read(constant_path(module), {"": files[CONSTANT_FILE]}, whole)

    def read_record(self, module: str) -> JsonObject | None:
        """Return what stands for the constant parameters of a module, or None if the commit has no such record."""
        files = constant_entries(self._commit.files, module)
        if CONSTANT_RECORD not in files:
            return None
        with _naming_host(self._processes):
            return self._held.document(files[CONSTANT_RECORD])

    def _read(self, path: str, files: ModuleFiles, target: Target) -> dict[str, Any]:
        stored = self._paths.generations / next(iter(files.values())).object
        try:
            with _naming_host(self._processes):
                state: dict[str, Any] = self._held.state(files, target)
                return state
        except UnreadableFile as error:
            # A pool may share its bytes with another one; the name that the user knows is the one in data/.
            shown = str(stored if "" in files else stored.parent)
            raise UnreadableFile(str(error).replace(shown, str(self._paths.data / path))) from error


@contextmanager
def committed_files(paths: ExperimentPaths, processes: Processes, commit: CommitToRead) -> Iterator[CommittedFiles]:
    """Hold the files of a commit open on this rank, verified; called by all ranks together.

    Files of shards are many and large, and each rank reads parts of them: one rank verifies each for all others.
    """
    held = HeldFiles(paths, commit.manifest, commit.files.values(), lazily=True)
    folder = commit.scratch / f"restored_{processes.rank}"
    try:
        shards = [commit.files[path] for path in sorted(commit.files) if _is_shard(path)]
        processes.on_all_ranks(_verify, held, shards[processes.rank :: processes.world_size], processes)
        held.trust(shards)
        processes.on_all_ranks(_copy_small_files, commit, held, folder, processes)
        yield CommittedFiles(paths, commit, held, folder, processes)
    finally:
        held.close()
        # Leftovers are removed with the claim.
        shutil.rmtree(folder, ignore_errors=True)


def _verify(held: HeldFiles, entries: list[Entry], processes: Processes) -> None:
    # Inside the action of each rank, so that the message names the machine that read other bytes.
    with _naming_host(processes):
        held.verify(entries)


def _is_shard(path: str) -> bool:
    """Return whether a file is one of several that hold a module or an optimizer together."""
    depth = {MODULE_CKPS: 3, OPTIM_CKPS: 2}.get(path.partition("/")[0])
    return depth is not None and path.count("/") == depth


def _copy_small_files(commit: CommitToRead, held: HeldFiles, folder: Path, processes: Processes) -> None:
    """Give components a folder of their own: they may do there what they want."""
    try:
        folder.mkdir()
        with _naming_host(processes):
            for path, entry in commit.files.items():
                # Lists of sealed files go by the name of their object, and are read by rank zero alone.
                if not path.startswith(_STATES) and path != entry.object:
                    held.copy(entry, folder / path)
    except OSError as error:
        raise PipelineError(
            f"Could not copy committed files to {folder}: {error.strerror or error}. The last commit is intact.\n"
            "  fix: free space or restore access, then run again with --auto."
        ) from error


@contextmanager
def _naming_host(processes: Processes) -> Iterator[None]:
    """Say on which machine a commit cannot be read that rank zero has just verified."""
    try:
        yield
    except (DamagedResults, CommitSuperseded) as error:
        if processes.is_rank_zero:
            raise
        raise DamagedResults(
            f"Host {socket.gethostname()} does not see the commit that rank 0 has verified: {error}\n"
            "  fix: let all machines see the same files: wait until the cache of the network file system expires, "
            "usually a minute, or mount it again, then run again with --auto."
        ) from error
