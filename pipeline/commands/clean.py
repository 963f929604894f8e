"""Show what could be freed, and free it if asked to; never what a resume needs.

Pools of single epochs can go, output that torchrun kept of ended runs, and of a finished experiment the states of its
optimizers.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.lifecycle.mode import check_results_exist, inspect_results
from pipeline.paths import MODULE_CKPS, OPTIM_CKPS, ExperimentPaths, data_home
from pipeline.store.changes import Changes
from pipeline.store.lock import RunLock, check_free
from pipeline.store.manifest import Manifest
from pipeline.store.store import ResultsStore, read_current_manifest
from pipeline.system.disk import Disk
from pipeline.system.files import num_bytes
from pipeline.system.formatting import shown_bytes

EXAMPLE = "example:\n  python -m pipeline clean digits --keep epoch_10 --yes"
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
        found = _find(paths, set(arguments.keep))
        total += sum(found.sizes.values())
        for what, size in found.sizes.items():
            print(f"{paths.name}: {what}, {shown_bytes(size)}")
        if arguments.yes:
            found.delete(paths)
    verb = "freed" if arguments.yes else "would be freed; --yes deletes"
    print(f"{shown_bytes(total)} {verb}" if total else "nothing to free")
    return 0


@dataclass
class _Found:
    """What can go: committed files by path below data/, folders of logs, and the size of each kind."""

    files: set[str] = field(default_factory=set)
    folders: list[Path] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)

    def delete(self, paths: ExperimentPaths) -> None:
        if self.files:
            _commit_removal(paths, self.files)
        for folder in self.folders:
            shutil.rmtree(folder)


def _find(paths: ExperimentPaths, kept: set[str]) -> _Found:
    manifest = read_current_manifest(paths) or Manifest()
    found = _Found()
    for what, files in _removable(paths, manifest, kept).items():
        found.files |= files
        found.sizes[what] = _freed(manifest, found.files) - sum(found.sizes.values())
    if _LOGS not in kept and paths.torchrun_logs.is_dir():
        found.folders.append(paths.torchrun_logs)
        found.sizes["output kept by torchrun"] = num_bytes(paths.torchrun_logs)
    return found


def _removable(paths: ExperimentPaths, manifest: Manifest, kept: set[str]) -> dict[str, set[str]]:
    """Return committed files that a resume does not need, by what they are."""
    pools = sorted({path.split("/")[1] for path in manifest.files if path.startswith(f"{_POOLS}epoch_")} - kept)
    found = {f"pool {pool}": {path for path in manifest.files if path.startswith(f"{_POOLS}{pool}/")} for pool in pools}
    optimizers = {path for path in manifest.files if path.startswith(_OPTIMIZERS)}
    if inspect_results(paths).is_finished and optimizers and "optimizers" not in kept:
        found["optimizer states"] = optimizers
    return found


def _freed(manifest: Manifest, removed: set[str]) -> int:
    """Return the bytes that only the removed names have."""
    kept = {entry.object for path, entry in manifest.files.items() if path not in removed}
    gone = {manifest.files[path].object: manifest.files[path].digest.size for path in removed}
    return sum(size for name, size in gone.items() if name not in kept)


def _commit_removal(paths: ExperimentPaths, files: set[str]) -> None:
    """Let a commit take the files away, so that every digest and reference still holds.

    A finished experiment needs no commit to fall back to, so that a second one frees the bytes at once; an unfinished
    one keeps its older commits, and their files go when training has made new ones.
    """
    disk = Disk()
    lock = RunLock(paths, disk)
    lock.acquire()
    try:
        store = ResultsStore(paths, disk, lock.claim)
        store.recover(lambda path: path not in files)
        progress = store.current.progress
        run_state = store.current.run_state
        for _ in range(2 if progress.is_finished else 1):
            store.commit(Changes(removed=files, is_partial=not progress.is_finished), progress, run_state)
    finally:
        lock.release()
