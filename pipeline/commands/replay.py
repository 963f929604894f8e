"""Rebuild one past step exactly: its items, losses and gradient norms.

The experiment is not touched: a copy of it continues, in a scratch folder, from the last commit before that step, or
from the beginning if no such commit is kept.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

from pipeline.errors import PipelineError, UsageError
from pipeline.lifecycle.mode import check_results_exist
from pipeline.lifecycle.starts import read_starts
from pipeline.paths import ExperimentPaths, data_home
from pipeline.store.lock import check_free
from pipeline.system.formatting import shown_number
from pipeline.tracing.past_step import copy_commit, find_commit_before, read_recorded_step
from pipeline.tracing.retrace import Plan, read_trace, retrace, scratch_home

EXAMPLE = "example:\n  training-pipeline replay digits --epoch 3 --step 17"
_TRACE = "replay"
_MAX_SHOWN_POINTS = 12
_VERDICTS = {
    "identical": "identical to the record: losses and gradient norms have the same bits",
    "different": "DIFFERENT from the record: other data, code, versions or processes than it was made with",
    "not recorded": "this step is not recorded yet: nothing to compare with",
}


class _Batch(TypedDict):
    position: int
    dataset: str
    rank: int
    points: list[int]
    losses: dict[str, float]


# What --json prints. The functional form is needed: "from" is a keyword.
_Replay = TypedDict(
    "_Replay",
    {
        "processes": int,
        "from": str,
        "epoch": int,
        "step": int,
        "batches": list[_Batch],
        "record": str,
        "rates": dict[str, dict[str, float]],
        "norms": dict[str, float],
        "loss_weights": dict[str, float],
        "skipped": bool,
    },
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", metavar="EXP")
    parser.add_argument("--epoch", type=int, required=True, metavar="E", help="counted from 1")
    parser.add_argument("--step", type=int, required=True, metavar="S", help="counted from 1")
    parser.add_argument("--nproc", type=int, metavar="N", help="number of processes (default: as at the last start)")
    parser.add_argument("--json", action="store_true", help="print what is known as JSON")
    parser.add_argument("--save", metavar="DIR", help="also save batches and losses per item, one file per process")
    parser.add_argument("--scratch", metavar="DIR", help="where to work (default: the system's temporary folder)")


def execute(arguments: argparse.Namespace) -> int:
    paths = ExperimentPaths(data_home(arguments.data_home), arguments.experiment)
    check_results_exist(paths)
    if arguments.epoch < 1 or arguments.step < 1 or (arguments.nproc or 1) < 1:
        raise UsageError("--epoch, --step and --nproc must be at least 1.")
    # A live run replaces the commit that would be copied.
    check_free(paths)
    # The line of a start may be damaged, and rounding depends on the number of processes.
    starts = [start for start in read_starts(paths) if "world_size" in start]
    nproc = arguments.nproc or (int(starts[-1]["world_size"]) if starts else 1)
    with scratch_home(paths, paths.results, arguments.scratch) as scratch:
        origin = find_commit_before(paths, arguments.epoch, arguments.step)
        if origin is not None:
            copy_commit(paths, scratch, origin)
        words = ["--resume"] if origin else []
        step = (arguments.epoch, arguments.step)
        done = retrace(scratch, nproc, words, Plan(_TRACE, last=step, detail=step))
        if done.returncode != 0:
            raise PipelineError(f"The step could not be rebuilt:\n{done.stderr.strip()}")
        came_from = f"commit {origin.generation} ({origin.progress})" if origin else "the beginning"
        replay = _collect(paths, scratch, arguments, nproc, came_from)
        print(json.dumps(replay, indent=1) if arguments.json else "\n".join(_lines(paths, replay)))
        if arguments.save:
            Path(arguments.save).mkdir(parents=True, exist_ok=True)
            for file in sorted((scratch.home / _TRACE).glob("batches_*.pt")):
                shutil.copyfile(file, Path(arguments.save) / file.name)
    return 1 if replay["record"] == "different" else 0


def _collect(
    paths: ExperimentPaths, scratch: ExperimentPaths, arguments: argparse.Namespace, nproc: int, came_from: str
) -> _Replay:
    """Return what the ranks have recorded of the step, and whether the results hold the same."""
    epoch = arguments.epoch
    step = arguments.step
    events = [event for event in read_trace(scratch, _TRACE) if (event["epoch"], event["step"]) == (epoch, step)]
    ends = [event for event in events if event["kind"] == "step"]
    if not ends:
        raise PipelineError(f"Epoch {epoch} of {paths.name!r} has no step {step}, or the experiment ends before.")
    losses: dict[int, dict[str, float]] = {}
    for event in events:
        # With sharded modules, several ranks may run a batch; the first of them counts.
        if event["kind"] == "losses":
            losses.setdefault(event["position"], event["means"])
    recorded = read_recorded_step(paths, epoch, step)
    replayed = read_recorded_step(scratch, epoch, step)
    return {
        "processes": nproc,
        "from": came_from,
        "epoch": epoch,
        "step": step,
        "batches": [
            {
                "position": event["position"],
                "dataset": event["dataset"],
                "rank": event["rank"],
                "points": event["points"],
                "losses": losses[event["position"]],
            }
            for event in events
            if event["kind"] == "batch"
        ],
        "record": "not recorded" if recorded is None else "identical" if recorded == replayed else "different",
        # The same on every rank.
        "rates": ends[0]["rates"],
        "norms": ends[0]["norms"],
        "loss_weights": ends[0]["loss_weights"],
        "skipped": ends[0]["skipped"],
    }


def _lines(paths: ExperimentPaths, replay: _Replay) -> Iterator[str]:
    processes = shown_number(replay["processes"], "process", "processes")
    yield f"{paths.name}, epoch {replay['epoch']}, step {replay['step']}: {processes}, from {replay['from']}"
    for batch in replay["batches"]:
        points = ", ".join(map(str, batch["points"][:_MAX_SHOWN_POINTS]))
        more = f" … ({len(batch['points'])} in all)" if len(batch["points"]) > _MAX_SHOWN_POINTS else ""
        losses = ", ".join(f"{name}: {mean:.6g}" for name, mean in batch["losses"].items())
        yield f"  batch {batch['position'] + 1}, {batch['dataset']}, rank {batch['rank']}: points {points}{more}"
        yield f"    {losses}"
    yield "  grad_norm: " + ", ".join(f"{name}: {norm:.6g}" for name, norm in replay["norms"].items())
    rates = {f"{name}/{group}": rate for name, groups in replay["rates"].items() for group, rate in groups.items()}
    yield "  lr after the step: " + ", ".join(f"{name}: {rate:.6g}" for name, rate in rates.items())
    if replay["skipped"]:
        yield "  the step was skipped: a loss or gradient is not finite"
    yield f"  {_VERDICTS[replay['record']]}"
