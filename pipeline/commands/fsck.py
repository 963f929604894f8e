"""Verify every digest of an experiment's results and say what to do about damage."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from pipeline.arguments import command_line
from pipeline.checkpoint.parts import PersistedParts
from pipeline.lifecycle.frozen_copy import differing_files
from pipeline.lifecycle.mode import check_results_exist
from pipeline.paths import MODULE_CKPS, ExperimentPaths, data_home
from pipeline.store.lock import check_free
from pipeline.store.verify import Inspection, inspect
from pipeline.system.formatting import shown_bytes

EXAMPLE = "example:\n  python -m pipeline fsck digits"
_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", metavar="EXP", help="the experiment to verify; nothing is changed")


def execute(arguments: argparse.Namespace) -> int:
    paths = ExperimentPaths(data_home(arguments.data_home), arguments.experiment)
    check_results_exist(paths)
    check_free(paths)
    found = inspect(paths, PersistedParts.is_needed)
    if found.commits:
        found.edited_copies = differing_files(paths.results, found.commits[0].copies)
    for line in _lines(paths, found):
        print(line)
    return 1 if found.is_damaged else 0


def _lines(paths: ExperimentPaths, found: Inspection) -> Iterator[str]:
    yield f"{paths.name}: {len(found.commits)} commits, {found.num_files} files, {shown_bytes(found.num_bytes)}"
    for manifest in found.commits:
        is_current = manifest is found.commits[0]
        verdict = "can be resumed from" if manifest in found.intact else "DAMAGED, cannot be resumed from"
        yield f"  commit {manifest.generation}{' (current)' if is_current else ''}, {manifest.progress}: {verdict}"
    if found.is_clean:
        yield "  every digest holds; data/ is complete; the frozen copy is as it was"
        return
    yield from _problems(paths, found)
    yield from _advice(paths, found)


def _problems(paths: ExperimentPaths, found: Inspection) -> Iterator[str]:
    if found.state_problem:
        yield f"  {paths.state_file} {found.state_problem}"
    for file in found.unreadable:
        yield f"  {file} is damaged"
    for damage in found.damages[:_SHOWN]:
        commits = ", ".join(map(str, damage.commits))
        yield f"  {damage.file} {damage.what} ({', '.join(damage.paths)}; commits {commits})"
        if damage.source is not None:
            yield f"    restore: cp {damage.source} {damage.file}"
    if len(found.damages) > _SHOWN:
        yield f"  … and {len(found.damages) - _SHOWN} more damaged files"
    for name in found.hidden_names[:_SHOWN]:
        yield f"  {paths.data / name} does not show the current commit yet; the committed file is intact"
    for name in found.replaced_names[:_SHOWN]:
        yield f"  {paths.data / name} was replaced; the committed file is intact"
    for name in found.edited_copies:
        yield f"  {paths.results / name} was edited since the experiment began"
    for path in found.strays[:_SHOWN]:
        yield f"  {path} belongs to no commit; the next start removes it"


def _advice(paths: ExperimentPaths, found: Inspection) -> Iterator[str]:
    resume = command_line(paths.name, paths.home, "--resume")
    if found.damages or found.unreadable or found.state_problem:
        lost = {path.split("/")[1] for path in _damaged(found) if path.startswith(f"{MODULE_CKPS}/")}
        if lost:
            intact = ", ".join(_intact_pools(found)) or "none"
            yield f"  damaged weight pools: {', '.join(sorted(lost))}; intact: {intact}"
        if found.intact:
            newest = found.intact[0]
            yield f"  next: {resume}    (continues from commit {newest.generation}, {newest.progress})"
        else:
            yield "  next: restore the folder from a backup; nothing here can be resumed"
    elif found.edited_copies:
        yield f"  next: restore these files, or {resume} --accept-edited-copy"
    else:
        if not found.replaced_names:
            yield "  every digest holds; nothing is damaged"
        yield f"  next: {resume}    (the next start completes this)"


def _damaged(found: Inspection) -> set[str]:
    return {path for damage in found.damages for path in damage.paths}


def _intact_pools(found: Inspection) -> list[str]:
    damaged = _damaged(found)
    files = [path for path in found.commits[0].files if path.startswith(f"{MODULE_CKPS}/")] if found.commits else []
    pools = dict.fromkeys(path.split("/")[1] for path in files)
    return [
        pool
        for pool in pools
        if not any(path in damaged for path in files if path.startswith(f"{MODULE_CKPS}/{pool}/"))
    ]
