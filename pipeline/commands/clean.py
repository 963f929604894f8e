"""Show what could be freed, and free it if asked to; never what a resume needs.

It frees pools of single epochs, output that torchrun kept of ended runs, and the optimizer states of a finished
experiment.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.lifecycle.mode import check_results_exist
from pipeline.paths import MODULE_CKPS, OPTIM_CKPS, ExperimentPaths, data_home
from pipeline.store.changes import Changes
from pipeline.store.lock import RunLock, check_free
from pipeline.store.manifest import Manifest
from pipeline.store.store import ResultsStore, read_current_manifest
from pipeline.system.disk import Disk
from pipeline.system.files import num_bytes
from pipeline.system.formatting import shown_bytes

EXAMPLE = "example:\n  training-pipeline clean digits --keep epoch_10 --yes"
_POOLS = f"{MODULE_CKPS}/"
_OPTIMIZERS = f"{OPTIM_CKPS}/"
_LOGS = "logs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiments", nargs="+", metavar="EXP")
    parser.add_argument(
        "--keep", action="append", default=[], metavar="WHAT", help="a pool such as epoch_10, or optimizers, or logs"
    )
    parser.add_argument("--yes", action="store_true", help="delete; without it, only say what would be")


def execute(arguments: argparse.Namespace) -> int:
    everything = [ExperimentPaths(data_home(arguments.data_home), name) for name in arguments.experiments]
    for paths in everything:
        check_results_exist(paths)
        check_free(paths)
    total = 0
    for paths in everything:
        removable = _find_removable(paths, set(arguments.keep))
        total += sum(removable.sizes.values())
        for kind, size in removable.sizes.items():
            print(f"{paths.name}: {kind}, {shown_bytes(size)}")
        if arguments.yes:
            if removable.files:
                _commit_removal(paths, removable.files)
            for folder in removable.folders:
                shutil.rmtree(folder)
    verb = "freed" if arguments.yes else "would be freed; --yes deletes"
    print(f"{shown_bytes(total)} {verb}" if total else "nothing to free")
    return 0


@dataclass
class _Removable:
    """What can go: committed files by path below data/, folders of logs, and the bytes of each kind."""

    files: set[str] = field(default_factory=set)
    folders: list[Path] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)


def _find_removable(paths: ExperimentPaths, kept: set[str]) -> _Removable:
    """Return what neither a resume needs nor the user wants to keep."""
    manifest = read_current_manifest(paths) or Manifest()
    pools = sorted({path.split("/")[1] for path in manifest.files if path.startswith(f"{_POOLS}epoch_")} - kept)
    prefixes = {f"pool {pool}": f"{_POOLS}{pool}/" for pool in pools}
    # An unfinished experiment needs the states of its optimizers to continue.
    if manifest.progress.is_finished and "optimizers" not in kept:
        prefixes["optimizer states"] = _OPTIMIZERS
    removable = _Removable()
    for kind, prefix in prefixes.items():
        files = {path for path in manifest.files if path.startswith(prefix)}
        if files:
            removable.files |= files
            # Pools share bytes: those go that only removed names have. Of these, some were counted before.
            kept_objects = {entry.object for path, entry in manifest.files.items() if path not in removable.files}
            gone = {manifest.files[path].object: manifest.files[path].digest.size for path in removable.files}
            num_freed = sum(size for name, size in gone.items() if name not in kept_objects)
            removable.sizes[kind] = num_freed - sum(removable.sizes.values())
    if _LOGS not in kept and paths.torchrun_logs.is_dir():
        removable.folders.append(paths.torchrun_logs)
        removable.sizes["output kept by torchrun"] = num_bytes(paths.torchrun_logs)
    return removable


def _commit_removal(paths: ExperimentPaths, files: set[str]) -> None:
    """Remove the files by a commit, so that every digest and reference still holds."""
    disk = Disk()
    lock = RunLock(paths, disk)
    lock.acquire()
    try:
        store = ResultsStore(paths, disk, lock.claim)
        # Damage in a file that is to be removed must not make recovery go back to an older commit.
        store.recover(lambda path: path not in files)
        progress = store.current.progress
        run_state = store.current.run_state
        # The older commits are kept with a new one, and their files with them. A finished experiment needs none to fall
        # back to: a second commit drops them and frees the bytes at once. Of an unfinished one they go when training
        # has made new commits.
        for _ in range(2 if progress.is_finished else 1):
            store.commit(Changes(removed=files, is_partial=not progress.is_finished), progress, run_state)
    finally:
        lock.release()
