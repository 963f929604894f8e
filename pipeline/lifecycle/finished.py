"""A finished experiment: left alone, unless it was killed between its last commit and its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pipeline.command_lines import run_line, verb_line
from pipeline.errors import DamagedResults
from pipeline.lifecycle.starts import reset_flags
from pipeline.paths import ExperimentPaths
from pipeline.store.lock import RunLock
from pipeline.store.store import ResultsStore, is_settled, read_current_manifest
from pipeline.system.disk import Disk
from pipeline.system.formatting import shown_values


def finish_pending(
    paths: ExperimentPaths, disk: Disk, is_needed: Callable[[str], bool], publish: Callable[[int], None]
) -> None:
    """Do what follows the last commit, if anything is left to do; its epoch may be unpublished."""
    # The usual case: nothing is left to do, so nothing is locked and nothing is written.
    if is_settled(paths):
        return
    lock = RunLock(paths, disk)
    lock.acquire()
    store = ResultsStore(paths, disk, lock.claim)
    store.recover(is_needed)
    if store.current.progress.is_finished:
        # Before the lock goes: until then, a kill leaves the claim behind, and the next start publishes again.
        publish(store.current.progress.epoch)
    lock.release()
    # Recovery falls back to an older commit if the newest is damaged, and that one is not finished.
    if not store.current.progress.is_finished:
        raise DamagedResults(f"{paths.name} was finished, but its last commit is damaged; data/ shows the one before.")


def finished_lines(paths: ExperimentPaths) -> Iterator[str]:
    """Yield when an experiment finished, its best value, and how to continue from it."""
    manifest = read_current_manifest(paths)
    state = manifest.run_state if manifest else {}
    best = state.get("best")
    value = f" Best: epoch {best['epoch']}, {shown_values(best['values'])}." if best else ""
    yield f"Experiment {paths.name} finished on {state.get('time', '?')}; nothing to do.{value}"
    yield f"  to start a variant: {verb_line('new', 'VARIANT', paths.home, '--from', paths.name)}"
    again = run_line(paths.name, paths.home, *reset_flags(paths))
    yield f"  to start again:     {again}    (deletes its results and logs)"
