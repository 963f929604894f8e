"""Verify every digest of an experiment's results and say what to do about damage."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from pipeline.checkpoint.parts import PersistedParts
from pipeline.lifecycle.frozen_copy import differing_files
from pipeline.lifecycle.mode import check_results_exist, inspect_results
from pipeline.lifecycle.starts import line_like_last_start, reset_flags
from pipeline.paths import ExperimentPaths, data_home
from pipeline.store.lock import check_free
from pipeline.store.verify import Inspection, inspect
from pipeline.store.weight_pools import damaged_pools, pool_names
from pipeline.system.formatting import shown_bytes

EXAMPLE = "example:\n  training-pipeline fsck digits"
_MAX_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", metavar="EXP", help="the experiment to verify; nothing is changed")


def execute(arguments: argparse.Namespace) -> int:
    paths = ExperimentPaths(data_home(arguments.data_home), arguments.experiment)
    check_results_exist(paths)
    # A live run replaces files while they are read, which would look like damage.
    check_free(paths)
    inspection = inspect(paths, PersistedParts.is_needed)
    if inspection.commits:
        # Compared here, because what belongs to a copy is decided above the store.
        inspection.edited_copies = differing_files(paths.results, inspection.commits[0].copies)
    for line in _lines(paths, inspection):
        print(line)
    return 1 if inspection.is_damaged else 0


def _lines(paths: ExperimentPaths, inspection: Inspection) -> Iterator[str]:
    num_commits = len(inspection.commits)
    yield f"{paths.name}: {num_commits} commits, {inspection.num_files} files, {shown_bytes(inspection.num_bytes)}"
    for manifest in inspection.commits:
        current = " (current)" if manifest is inspection.commits[0] else ""
        verdict = "intact, the end" if manifest.progress.is_finished else "can be resumed from"
        if manifest not in inspection.intact:
            verdict = "DAMAGED, cannot be resumed from"
        yield f"  commit {manifest.generation}{current}, {manifest.progress}: {verdict}"
    if inspection.is_clean:
        yield "  every digest holds; data/ is complete; the frozen copy is as it was"
        return
    yield from _problems(paths, inspection)
    resume = line_like_last_start(paths, "--resume")
    if inspection.damages or inspection.unreadable or inspection.state_problem:
        yield from _damaged_pools(inspection)
        if inspect_results(paths).is_finished:
            # There is nothing to continue: a finished experiment is left alone.
            reset = line_like_last_start(paths, *reset_flags(paths))
            yield f"  next: restore these files from a backup, or {reset}    (trains it again)"
        elif inspection.intact:
            newest = inspection.intact[0]
            yield f"  next: {resume}    (continues from commit {newest.generation}, {newest.progress})"
        else:
            yield "  next: restore the folder from a backup; nothing here can be resumed"
    elif inspection.edited_copies:
        yield f"  next: restore these files, or {resume} --accept-edited-copy"
    else:
        # Only names are missing or in the way, as after a kill between a commit and its names in data/.
        if not inspection.replaced_names:
            yield "  every digest holds; nothing is damaged"
        yield f"  next: {resume}    (the next start completes this)"


def _problems(paths: ExperimentPaths, inspection: Inspection) -> Iterator[str]:
    if inspection.state_problem:
        yield f"  {paths.state_file} {inspection.state_problem}"
    for file in inspection.unreadable:
        yield f"  {file} is damaged"
    for damage in inspection.damages[:_MAX_SHOWN]:
        commits = ", ".join(map(str, damage.commits))
        yield f"  {damage.file} {damage.what} ({', '.join(damage.paths)}; commits {commits})"
        if damage.source is not None:
            yield f"    restore: cp {damage.source} {damage.file}"
    if len(inspection.damages) > _MAX_SHOWN:
        yield f"  … and {len(inspection.damages) - _MAX_SHOWN} more damaged files"
    for name in inspection.hidden_names[:_MAX_SHOWN]:
        yield f"  {paths.data / name} does not show the current commit yet; the committed file is intact"
    for name in inspection.replaced_names[:_MAX_SHOWN]:
        yield f"  {paths.data / name} was replaced; the committed file is intact"
    for name in inspection.edited_copies:
        yield f"  {paths.results / name} was edited since the experiment began"
    for path in inspection.strays[:_MAX_SHOWN]:
        yield f"  {path} belongs to no commit; the next start removes it"


def _damaged_pools(inspection: Inspection) -> Iterator[str]:
    """Yield which weights are lost and which ones can still be evaluated or exported, if any are lost."""
    damaged = {path for damage in inspection.damages for path in damage.paths}
    lost = damaged_pools({path for manifest in inspection.commits for path in manifest.files}, damaged)
    if lost:
        # Of the current commit: a pool of an older one may be lost while its successor is whole.
        current = inspection.commits[0]
        broken = damaged_pools(current.files, damaged)
        intact = ", ".join(pool for pool in pool_names(current) if pool not in broken) or "none"
        yield f"  damaged weight pools: {', '.join(sorted(lost))}; intact: {intact}"
