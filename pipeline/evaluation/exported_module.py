"""Modules to be exported: read from a pool or from a foreign file, and written into one file."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import torch

from pipeline.distributed.processes import Processes
from pipeline.errors import PipelineError, UnreadableFile, UsageError, nearest
from pipeline.experiment.assembly import read_modules
from pipeline.experiment.constant_parameters import Record, Tensors, check_rebuilt
from pipeline.experiment.initial_weights import modules_in, pick_module, rebuild_modules, renamed_keys
from pipeline.experiment.settings.settings import parse_settings, read_contents
from pipeline.lifecycle.mode import check_results_exist
from pipeline.paths import ExperimentPaths
from pipeline.serialization.torch_files import SAFETENSORS, load_weights, put_together, safetensors_package
from pipeline.store.manifest import Entry, Manifest
from pipeline.store.weight_pools import (
    CONSTANT_FILE,
    CONSTANT_RECORD,
    FROZEN,
    HeldFiles,
    ModuleFiles,
    epoch_of,
    open_commit_on_all_ranks,
    pool_entries,
)
from pipeline.system.disk import Writer

SUFFIXES = (".pt", SAFETENSORS)
_MAX_SHOWN = 10
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(frozen=True)
class Exported:
    """One module: its name in the file, where it came from, and its weights."""

    name: str
    source: str
    # Tensors, and what a module has added by get_extra_state.
    weights: Mapping[str, object]
    place: str = ""
    is_foreign: bool = False
    dropped: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """The name it had where it came from, which no other module has."""
        return f"{self.source}:{self.name}"

    @property
    def is_frozen(self) -> bool:
        return not self.is_foreign and self.source.endswith(f":{FROZEN}")

    @property
    def num_parameters(self) -> int:
        return sum(value.numel() for value in self.weights.values() if isinstance(value, torch.Tensor))


def from_experiment(
    paths: ExperimentPaths, pool: str, module: str | None, *, trained_only: bool, leaves_constants_out: bool = False
) -> list[Exported]:
    """Read a pool and the frozen modules, or one module; damaged files are refused by name."""

    def choose_modules(manifest: Manifest) -> list[tuple[str, str, ModuleFiles]]:
        pools = [pool] if trained_only or pool == FROZEN else [FROZEN, pool]
        modules = [
            (origin, name, files) for origin in pools for name, files in pool_entries(paths, manifest, origin).items()
        ]
        if leaves_constants_out:
            common = {CONSTANT_FILE, CONSTANT_RECORD}
            modules = [
                (origin, name, {file: entry for file, entry in files.items() if file not in common})
                for origin, name, files in modules
            ]
        if module is None:
            return modules
        known = [name for _, name, _ in modules]
        if module not in known:
            reason = f"there are {', '.join(known) or 'none'}.{nearest(module, known)}"
            raise UsageError(f"{paths.name}:{pool} has no module {module!r}; {reason}")
        return [(origin, name, files) for origin, name, files in modules if name == module]

    def choose_entries(manifest: Manifest) -> list[Entry]:
        return [entry for *_, files in choose_modules(manifest) for entry in files.values()]

    check_results_exist(paths)
    exported = []
    with open_commit_on_all_ranks(paths, Processes(), choose_entries) as (manifest, held):
        chosen = choose_modules(manifest)
        rebuilt = _rebuild(paths, held, {name: files for _, name, files in chosen if CONSTANT_RECORD in files})
        for origin, name, files in chosen:
            epoch = epoch_of(manifest, origin)
            commit = max(entry.generation for entry in files.values())
            place = ("" if epoch is None else f"epoch {epoch}, ") + f"commit {commit}"
            weights = put_together(rebuilt.get(name, {}), held.state(files))
            exported.append(Exported(name, f"{paths.name}:{origin}", weights, place))
    return exported


def _rebuild(paths: ExperimentPaths, held: HeldFiles, recorded: Mapping[str, ModuleFiles]) -> dict[str, Tensors]:
    """Return what the commits of some modules leave out, as the code of the experiment and its sources make it."""
    if not recorded:
        return {}
    # The results are only read.
    sys.dont_write_bytecode = True
    folder = paths.results / "pymodules"
    settings = parse_settings(read_contents(paths.results / "settings"))
    modules = read_modules(folder, settings)
    rebuild_modules(modules, recorded.keys(), paths, folder, settings.training)
    records = {name: Record.from_json(held.document(files[CONSTANT_RECORD])) for name, files in recorded.items()}
    return {name: check_rebuilt(name, modules[name].module, record, folder) for name, record in records.items()}


def from_file(path: Path, entry: str | None, strip_prefix: str, key_map: Mapping[str, str]) -> list[Exported]:
    """Read a foreign file: all modules in it or one entry, on the CPU, with clean keys and nothing but tensors."""
    loaded = load_weights(path)
    try:
        modules = {entry: pick_module(loaded, entry, path)} if entry else modules_in(loaded, path)
        renamed = {name: renamed_keys(weights, strip_prefix, key_map) for name, weights in modules.items()}
    except ValueError as error:
        raise UnreadableFile(f"{error}.") from error
    keys = [str(key) for weights in modules.values() for key in weights]
    if not any(key.startswith(strip_prefix) for key in keys or [strip_prefix]):
        raise UsageError(f"--strip-prefix {strip_prefix!r} fits no key of {path}; the first is {keys[0]!r}.")
    # What other trainers save next to the weights, such as an optimizer, is named as dropped.
    is_wrapped = not entry and modules.get("") is not loaded
    unused = [
        str(key)
        for key, value in loaded.items()
        if is_wrapped and not any(value is weights for weights in modules.values())
    ]
    return [_keep_tensors(name or path.stem, path, weights, unused) for name, weights in renamed.items()]


def _keep_tensors(name: str, path: Path, weights: Mapping[str, object], unused: list[str]) -> Exported:
    tensors = {key: value.detach() for key, value in weights.items() if isinstance(value, torch.Tensor)}
    special = [key for key, tensor in tensors.items() if tensor.layout != torch.strided or tensor.is_quantized]
    if special:
        raise UnreadableFile(
            f"{path} must hold plain tensors, but these are sparse or quantised: {', '.join(special)}."
        )
    dropped = (*unused, *(key for key in weights if key not in tensors))
    if not tensors and dropped:
        raise UnreadableFile(f"{path} must hold tensors, but has none among {', '.join(dropped[:_MAX_SHOWN])}.")
    # A tensor may be a small view of a large storage, all of which would be written.
    copies = {key: tensor.contiguous().clone() for key, tensor in tensors.items()}
    return Exported(_NOT_IN_NAMES.sub("_", name), str(path), copies, is_foreign=True, dropped=dropped)


def writer(modules: list[Exported], path: Path) -> Writer:
    """Return a writer of all modules: dicts by module for torch, or keys that begin with the module's name."""
    if path.suffix != SAFETENSORS:
        return partial(torch.save, {module.name: dict(module.weights) for module in modules})
    package = safetensors_package(path)
    values = {f"{module.name}.{key}": value for module in modules for key, value in module.weights.items()}
    tensors = {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}
    others = [key for key in values if key not in tensors]
    if others:
        raise UsageError(
            f"A safetensors file holds tensors only, but these are not: {', '.join(others[:_MAX_SHOWN])}.",
            "write a .pt file instead",
        )
    sources = {module.name: f"{module.source} {module.place}".strip() for module in modules}
    metadata = {"format": "pt", "modules": json.dumps(sources)}

    def write(file: BinaryIO) -> None:
        try:
            # Tensors that share memory are refused; a copy of each shares none.
            copies = {key: tensor.contiguous().clone() for key, tensor in tensors.items()}
            content = package.save(copies, metadata=metadata)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise PipelineError(
                f"These weights cannot be written as safetensors: {reason}.\n  fix: write a .pt file instead."
            ) from error
        file.write(content)

    return write
