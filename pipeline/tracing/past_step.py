"""A step of the past: the commit to run it again from, and what the results have recorded of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from pipeline.checkpoint.parts import PersistedParts
from pipeline.paths import LOSS_REG_DATA, LR_DATA, RUNNING_STEPS, ExperimentPaths
from pipeline.progress import TRAINING
from pipeline.store.compare import read_any
from pipeline.store.generations import Generations
from pipeline.store.manifest import Manifest, State, sealed_json
from pipeline.store.store import read_current_manifest
from pipeline.store.verify import inspect

# How the columns of the running epoch are called in the files of a finished one.
_FINAL_NAMES = {"means": "means", "totals": "totals", "items": "items", "grad_norm": "grad_norms"}


def find_commit_before(paths: ExperimentPaths, epoch: int, step: int) -> Manifest | None:
    """Return the newest commit that can be resumed from and lies before the step."""
    # Newest first. Nothing continues from the commit of a finished experiment.
    for manifest in inspect(paths, PersistedParts.is_needed).intact:
        progress = manifest.progress
        if progress.stage == TRAINING:
            lies_before = (progress.epoch, progress.step) < (epoch, step)
        else:
            lies_before = progress.epoch < epoch
        if lies_before and not progress.is_finished:
            return manifest
    return None


def copy_commit(paths: ExperimentPaths, scratch: ExperimentPaths, manifest: Manifest) -> None:
    """Set up results in the scratch folder that know of one commit only."""
    # Copied, not linked: the scratch folder may be on another file system, and must not touch the original.
    for name in sorted(Generations(paths).objects(manifest)):
        target = scratch.generations / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(paths.generations / name, target)
    for part in ("pymodules", "settings"):
        shutil.copytree(paths.results / part, scratch.results / part)
    # The names in data/ are made by the recovery at its start, as after a kill.
    scratch.data.mkdir()
    state = State(manifest.generation, manifest.progress)
    scratch.state_file.write_bytes(sealed_json(state.as_json()))


def read_recorded_step(paths: ExperimentPaths, epoch: int, step: int) -> dict[str, str] | None:
    """Return the recorded values of a step to the last bit, from its epoch's files or the running epoch's segments."""
    manifest = read_current_manifest(paths)
    if manifest is None:
        return None
    generations = Generations(paths)
    values: dict[str, np.ndarray] = {}
    for path, entry in generations.all_files(manifest).items():
        is_losses = path.startswith(f"{LOSS_REG_DATA}/train/")
        if path.endswith(f"/step_data_{epoch}.npz") and (is_losses or path.startswith(f"{LR_DATA}/")):
            arrays = read_any(generations.stored(entry))
            owner = Path(path).parent.name
            names = {"means", "totals", "items"} if is_losses else {"grad_norms"}
            values |= {f"{owner} {name}": arrays[name][step - 1 : step] for name in names}
    if not values and manifest.progress.epoch == epoch:
        values = _read_running_step(generations, manifest, step)
    recorded = {name: array.tobytes().hex() for name, array in values.items() if len(array)}
    return recorded or None


def _read_running_step(generations: Generations, manifest: Manifest, step: int) -> dict[str, np.ndarray]:
    """Return a step of the epoch that is being trained, whose steps are committed in segments."""
    for path, entry in sorted(manifest.files.items()):
        if not path.startswith(f"{RUNNING_STEPS}/steps_"):
            continue
        arrays = read_any(generations.stored(entry))
        # A segment's file is named by the number of steps before it.
        num_before = int(path.split("_")[1].split(".")[0])
        if num_before < step <= num_before + len(arrays["skipped"]):
            index = step - 1 - num_before
            columns = {tuple(name.split("/")): array for name, array in arrays.items()}
            return {
                f"{key[1]} {_FINAL_NAMES[key[0]]}": array[index:][:1]
                for key, array in columns.items()
                if key[0] in _FINAL_NAMES
            }
    return {}
