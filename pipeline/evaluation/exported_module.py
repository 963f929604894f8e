"""Modules on their way into one file: read from a pool or from a foreign file, and written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from pipeline.distributed.processes import Processes
from pipeline.errors import PipelineError, UnreadableFile, UsageError, nearest
from pipeline.experiment.initial_weights import modules_in, pick_module, renamed_keys
from pipeline.lifecycle.mode import check_results_exist
from pipeline.paths import ExperimentPaths
from pipeline.serialization.torch_files import SAFETENSORS, load_weights, safetensors_package
from pipeline.store.manifest import Entry, Manifest
from pipeline.store.weight_pools import FROZEN, ModuleFiles, epoch_of, open_commit_on_all_ranks, pool_entries
from pipeline.system.disk import Writer

SUFFIXES = (".pt", SAFETENSORS)
_SHOWN = 10
_ODD = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(frozen=True)
class Exported:
    """One module: its name in the file, where it came from, and its weights."""

    name: str
    source: str
    weights: Mapping[str, Any]
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
        return sum(one.numel() for one in self.weights.values() if isinstance(one, torch.Tensor))


def from_experiment(paths: ExperimentPaths, pool: str, module: str | None, *, trained_only: bool) -> list[Exported]:
    """Read a pool and the frozen modules, or one module; damaged files are refused by name."""

    def chosen(manifest: Manifest) -> list[tuple[str, str, ModuleFiles]]:
        pools = [pool] if trained_only or pool == FROZEN else [FROZEN, pool]
        found = [(one, *named) for one in pools for named in pool_entries(paths, manifest, one).items()]
        known = [name for _, name, _ in found]
        if module not in (None, *known):
            reason = f"there are {', '.join(known) or 'none'}.{nearest(str(module), known)}"
            raise UsageError(f"{paths.name}:{pool} has no module {module!r}; {reason}")
        return [one for one in found if module in (None, one[1])]

    def needed(manifest: Manifest) -> list[Entry]:
        return [entry for *_, files in chosen(manifest) for entry in files.values()]

    check_results_exist(paths)
    with open_commit_on_all_ranks(paths, Processes(), needed) as (manifest, held):
        return [
            Exported(name, f"{paths.name}:{origin}", held.state(files), _place(manifest, origin, files))
            for origin, name, files in chosen(manifest)
        ]


def _place(manifest: Manifest, pool: str, files: ModuleFiles) -> str:
    epoch = epoch_of(manifest, pool)
    commit = max(entry.generation for entry in files.values())
    return ("" if epoch is None else f"epoch {epoch}, ") + f"commit {commit}"


def from_file(path: Path, entry: str | None, strip_prefix: str, key_map: Mapping[str, str]) -> list[Exported]:
    """Read a foreign file: all modules in it or one entry, on the CPU, with clean keys and nothing but tensors."""
    loaded = load_weights(path)
    try:
        found = {entry: pick_module(loaded, entry, path)} if entry else modules_in(loaded, path)
        renamed = {name: renamed_keys(one, strip_prefix, key_map) for name, one in found.items()}
    except ValueError as error:
        raise UnreadableFile(f"{error}.") from error
    keys = [str(key) for one in found.values() for key in one]
    if not any(key.startswith(strip_prefix) for key in keys or [strip_prefix]):
        raise UsageError(f"--strip-prefix {strip_prefix!r} fits no key of {path}; the first is {keys[0]!r}.")
    is_wrapped = not entry and found.get("") is not loaded
    beside = [str(key) for key, one in loaded.items() if is_wrapped and not any(one is used for used in found.values())]
    return [_cleaned(name or path.stem, path, weights, beside) for name, weights in renamed.items()]


def _cleaned(name: str, path: Path, weights: dict[str, Any], beside: list[str]) -> Exported:
    found = {key: one.detach() for key, one in weights.items() if isinstance(one, torch.Tensor)}
    odd = [key for key, one in found.items() if one.layout != torch.strided or one.is_quantized]
    if odd:
        raise UnreadableFile(f"{path} must hold plain tensors, but these are sparse or quantised: {', '.join(odd)}.")
    # A tensor may be a small view of a large storage, all of which would be written.
    tensors = {key: one.contiguous().clone() for key, one in found.items()}
    dropped = (*beside, *(key for key in weights if key not in tensors))
    if not tensors and dropped:
        raise UnreadableFile(f"{path} must hold tensors, but has none among {', '.join(dropped[:_SHOWN])}.")
    return Exported(_ODD.sub("_", name), str(path), tensors, is_foreign=True, dropped=dropped)


def writer(modules: list[Exported], path: Path) -> Writer:
    """Return a writer of all modules: dicts by module for torch, or keys that begin with the module's name."""
    is_torch = path.suffix != SAFETENSORS
    return _pt_writer(modules) if is_torch else _safetensors_writer(modules, safetensors_package(path))


def _pt_writer(modules: list[Exported]) -> Writer:
    def write(file: BinaryIO) -> None:
        torch.save({module.name: dict(module.weights) for module in modules}, file)

    return write


def _safetensors_writer(modules: list[Exported], package: Any) -> Writer:
    flat = {f"{module.name}.{key}": value for module in modules for key, value in module.weights.items()}
    plain = [key for key, value in flat.items() if not isinstance(value, torch.Tensor)]
    if plain:
        raise UsageError(
            f"A safetensors file holds tensors only, but these are not: {', '.join(plain[:_SHOWN])}.",
            "write a .pt file instead",
        )
    sources = {module.name: f"{module.source} {module.place}".strip() for module in modules}
    metadata = {"format": "pt", "modules": json.dumps(sources)}

    def write(file: BinaryIO) -> None:
        try:
            # Tensors that share memory are refused; a copy of each shares none.
            content = package.save({key: one.contiguous().clone() for key, one in flat.items()}, metadata=metadata)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise PipelineError(
                f"These weights cannot be written as safetensors: {reason}.\n  fix: write a .pt file instead."
            ) from error
        file.write(content)

    return write
