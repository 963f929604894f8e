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
from typing import Any

from pipeline.checkpoint.parts import PersistedParts
from pipeline.errors import PipelineError, UsageError
from pipeline.lifecycle.mode import check_results_exist
from pipeline.lifecycle.starts import read_starts
from pipeline.paths import LOSS_REG_DATA, LR_DATA, RUNNING_STEPS, ExperimentPaths, data_home
from pipeline.progress import TRAINING, Progress
from pipeline.store.compare import read_any
from pipeline.store.generations import Generations
from pipeline.store.lock import check_free
from pipeline.store.manifest import Manifest, State, sealed_json
from pipeline.store.store import read_current_manifest
from pipeline.store.verify import inspect
from pipeline.tracing.retrace import read_trace, retrace, scratch_home

EXAMPLE = "example:\n  python -m pipeline replay digits --epoch 3 --step 17"
_SHOWN_POINTS = 12


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
    _check(paths, arguments)
    starts = [start for start in read_starts(paths) if "world_size" in start]
    nproc = arguments.nproc or (int(starts[-1]["world_size"]) if starts else 1)
    with scratch_home(paths, paths.results, arguments.scratch) as scratch:
        origin = _nearest_commit(paths, arguments.epoch, arguments.step)
        if origin is not None:
            _copy_commit(paths, scratch, origin)
        place = [arguments.epoch, arguments.step]
        words = ["--resume"] if origin else []
        done = retrace(scratch, nproc, words, {"name": "replay", "last": place, "detail": place})
        if done.returncode != 0:
            raise PipelineError(f"The step could not be rebuilt:\n{done.stderr.strip()}")
        return _tell(paths, scratch, arguments, {"processes": nproc, "from": _origin(origin)})


def _origin(manifest: Manifest | None) -> str:
    return f"commit {manifest.generation} ({manifest.progress})" if manifest else "the beginning"


def _check(paths: ExperimentPaths, arguments: argparse.Namespace) -> None:
    check_results_exist(paths)
    if arguments.epoch < 1 or arguments.step < 1 or (arguments.nproc or 1) < 1:
        raise UsageError("--epoch, --step and --nproc must be at least 1.")
    check_free(paths)


def _nearest_commit(paths: ExperimentPaths, epoch: int, step: int) -> Manifest | None:
    """Return the newest commit that can be resumed from and lies before the step."""
    intact = inspect(paths, PersistedParts.is_needed).intact
    return next(
        (one for one in intact if not one.progress.is_finished and _lies_before(one.progress, epoch, step)), None
    )


def _lies_before(progress: Progress, epoch: int, step: int) -> bool:
    if progress.stage == TRAINING:
        return (progress.epoch, progress.step) < (epoch, step)
    return progress.epoch < epoch


def _copy_commit(paths: ExperimentPaths, scratch: ExperimentPaths, manifest: Manifest) -> None:
    """Set up results in the scratch folder that know of one commit only."""
    generations = Generations(paths)
    for name in sorted(generations.objects(manifest)):
        target = scratch.generations / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(paths.generations / name, target)
    for part in ("pymodules", "settings"):
        shutil.copytree(paths.results / part, scratch.results / part)
    scratch.data.mkdir()
    state = State(manifest.generation, manifest.progress)
    scratch.state_file.write_bytes(sealed_json(state.as_json()))


def _tell(
    paths: ExperimentPaths, scratch: ExperimentPaths, arguments: argparse.Namespace, facts: dict[str, Any]
) -> int:
    place = (arguments.epoch, arguments.step)
    seen = [one for one in read_trace(scratch, "replay") if (one["epoch"], one["step"]) == place]
    if not any(one["kind"] == "step" for one in seen):
        raise PipelineError(
            f"Epoch {place[0]} of {paths.name!r} has no step {place[1]}, or the experiment ends before."
        )
    step = next(one for one in seen if one["kind"] == "step")
    batches = [_batch(one, seen) for one in seen if one["kind"] == "batch"]
    recorded, replayed = (_recorded_step(one, *place) for one in (paths, scratch))
    verdict = "not recorded" if recorded is None else "identical" if recorded == replayed else "different"
    found = {
        **facts,
        "epoch": place[0],
        "step": place[1],
        "batches": batches,
        "record": verdict,
        **{name: step[name] for name in ("rates", "norms", "loss_weights", "skipped")},
    }
    print(json.dumps(found, indent=1) if arguments.json else "\n".join(_lines(paths, found)))
    if arguments.save:
        Path(arguments.save).mkdir(parents=True, exist_ok=True)
        for file in sorted((scratch.home / "replay").glob("batches_*.pt")):
            shutil.copyfile(file, Path(arguments.save) / file.name)
    return 0 if verdict != "different" else 1


def _batch(batch: dict[str, Any], seen: list[dict[str, Any]]) -> dict[str, Any]:
    losses = next(one for one in seen if one["kind"] == "losses" and one["position"] == batch["position"])
    return {name: batch[name] for name in ("position", "dataset", "rank", "points")} | {"losses": losses["means"]}


def _lines(paths: ExperimentPaths, found: dict[str, Any]) -> Iterator[str]:
    processes = "1 process" if found["processes"] == 1 else f"{found['processes']} processes"
    yield f"{paths.name}, epoch {found['epoch']}, step {found['step']}: {processes}, from {found['from']}"
    for batch in found["batches"]:
        points = ", ".join(map(str, batch["points"][:_SHOWN_POINTS]))
        more = f" … ({len(batch['points'])} in all)" if len(batch["points"]) > _SHOWN_POINTS else ""
        losses = ", ".join(f"{name}: {mean:.6g}" for name, mean in batch["losses"].items())
        yield f"  batch {batch['position'] + 1}, {batch['dataset']}, rank {batch['rank']}: points {points}{more}"
        yield f"    {losses}"
    yield "  grad_norm: " + ", ".join(f"{name}: {norm:.6g}" for name, norm in found["norms"].items())
    rates = {f"{name}/{group}": rate for name, groups in found["rates"].items() for group, rate in groups.items()}
    yield "  lr after the step: " + ", ".join(f"{name}: {rate:.6g}" for name, rate in rates.items())
    if found["skipped"]:
        yield "  the step was skipped: a loss or gradient is not finite"
    yield {
        "identical": "  identical to the record: losses and gradient norms have the same bits",
        "different": "  DIFFERENT from the record: other data, code, versions or processes than it was made with",
        "not recorded": "  this step is not recorded yet: nothing to compare with",
    }[found["record"]]


def _recorded_step(paths: ExperimentPaths, epoch: int, step: int) -> dict[str, str] | None:
    """Return the recorded values of a step to the last bit, from its epoch's files or the running epoch's segments."""
    manifest = read_current_manifest(paths)
    if manifest is None:
        return None
    values: dict[str, Any] = {}
    for path, entry in Generations(paths).all_files(manifest).items():
        is_losses = path.startswith(f"{LOSS_REG_DATA}/train/")
        if path.endswith(f"/step_data_{epoch}.npz") and (is_losses or path.startswith(f"{LR_DATA}/")):
            arrays = read_any(Generations(paths).stored(entry))
            owner = Path(path).parent.name
            names = {"means", "totals", "items"} if is_losses else {"grad_norms"}
            values |= {f"{owner} {name}": arrays[name][step - 1 : step] for name in names}
    if not values and manifest.progress.epoch == epoch:
        values = _segment_values(paths, manifest, step)
    found = {name: array.tobytes().hex() for name, array in values.items() if len(array)}
    return found or None


def _segment_values(paths: ExperimentPaths, manifest: Manifest, step: int) -> dict[str, Any]:
    names = {"means": "means", "totals": "totals", "items": "items", "grad_norm": "grad_norms"}
    for path, entry in sorted(manifest.files.items()):
        if not path.startswith(f"{RUNNING_STEPS}/steps_"):
            continue
        arrays = read_any(Generations(paths).stored(entry))
        first = int(path.split("_")[1].split(".")[0])
        if first < step <= first + len(arrays["skipped"]):
            columns = {tuple(name.split("/")): array for name, array in arrays.items()}
            found = {(key[1], names[key[0]]): array for key, array in columns.items() if key[0] in names}
            return {" ".join(key): array[step - 1 - first :][:1] for key, array in found.items()}
    return {}
