"""Initial weights from a checkpoint file or from another experiment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeline.errors import InvalidExperiment, Problem, UnreadableFile, UsageError, nearest
from pipeline.experiment.definitions import Components, ModuleDefinition, WeightSource
from pipeline.paths import ExperimentPaths, check_name, pool_file
from pipeline.runtime.safe_loading import load_tensors

_SHOWN = 10


def load_initial_weights(components: Components, paths: ExperimentPaths, folder: Path) -> None:
    """Fill every module that names a source; all misfits are raised together."""
    problems: list[Problem] = []
    for name, definition in components.modules.items():
        if definition.source is None:
            continue
        where = str(folder / "modules" / f"{name}.py")
        try:
            path = _source_file(definition.source, paths)
            problems += [Problem(where, what) for what in _fill(definition, definition.source, path)]
        except (UsageError, ValueError) as error:
            problems.append(Problem(where, str(error)))
    if problems:
        raise InvalidExperiment(problems)


def _source_file(source: WeightSource, paths: ExperimentPaths) -> Path:
    if source.ckp_name is not None:
        path = paths.module_ckps / check_name(source.ckp_name, "ckp_name")
        path = path if path.is_file() else path.with_name(f"{path.name}.pt")
        if not path.is_file():
            present = sorted(entry.name for entry in paths.module_ckps.glob("*")) if paths.module_ckps.is_dir() else []
            listed = ", ".join(present) or "no files"
            raise ValueError(
                f"load_weights_from_ckp needs {path}, but there are {listed}.{nearest(path.name, present)}"
            )
        return path
    other = paths.other(str(source.exp_name))
    pool, module = (
        check_name(str(source.ckp_pool_name), "ckp_pool_name"),
        check_name(str(source.module_name), "module_name"),
    )
    path = pool_file(other.data, pool, module)
    if not path.is_file():
        pools = sorted(entry.name for entry in (other.data / "module_ckps").glob("*"))
        modules = sorted(entry.stem for entry in path.parent.glob("*.pt"))
        raise ValueError(
            f"load_weights_from_exp needs {path}, but experiment {source.exp_name!r} has the pools "
            f"{', '.join(pools) or 'none'}, and in {source.ckp_pool_name!r} the modules {', '.join(modules) or 'none'}"
        )
    return path


def _fill(definition: ModuleDefinition, source: WeightSource, path: Path) -> Iterator[str]:
    """Load a file into a module, or yield why it does not fit."""
    try:
        loaded = load_tensors(path)
    except UnreadableFile as error:
        yield str(error)
        return
    weights = _renamed(loaded, source)
    if not isinstance(weights, Mapping):
        yield f"{path} must hold a dict of tensors, but holds {type(loaded).__name__}"
        return
    yield from _misfits(definition.module, weights, source, path)


def _renamed(loaded: Any, source: WeightSource) -> Any:
    if isinstance(loaded, Mapping) and isinstance(loaded.get("state_dict"), Mapping):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, Mapping):
        return None
    stripped = {str(key).removeprefix(source.strip_prefix): value for key, value in loaded.items()}
    return {_mapped(key, source.key_map): value for key, value in stripped.items()}


def _mapped(key: str, key_map: Mapping[str, str]) -> str:
    """Rename a key by its whole name, else by the longest prefix the map knows."""
    prefixes = [known for known in key_map if key == known or key.startswith(known)]
    longest = max(prefixes, key=len, default="")
    return key_map[longest] + key.removeprefix(longest) if longest else key


def _misfits(module: nn.Module, weights: Mapping[str, Any], source: WeightSource, path: Path) -> Iterator[str]:
    own = module.state_dict()
    shapes = [
        f"{key} {_shape(weights[key])} instead of {_shape(own[key])}"
        for key in sorted(set(own) & set(weights))
        if isinstance(own[key], torch.Tensor) and _shape(own[key]) != _shape(weights[key])
    ]
    missing, unexpected = sorted(set(own) - set(weights)), sorted(set(weights) - set(own))
    kinds = {"missing": missing, "unexpected": unexpected} if source.strict else {}
    found = [f"{kind} {_first(keys)}" for kind, keys in {**kinds, "differing shapes": shapes}.items() if keys]
    if found:
        yield f"the weights of {path} must fit the module, but: {'; '.join(found)}"
        return
    try:
        module.load_state_dict({key: weights[key] for key in own if key in weights}, strict=source.strict)
    except RuntimeError as error:
        # Tensors of the right shape can still be of a kind that cannot be copied, such as quantised ones.
        yield f"the weights of {path} must fit the module, but: {' '.join(str(error).split())}"


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else f"of type {type(value).__name__}"


def _first(keys: list[str]) -> str:
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return f"({len(keys)}) {', '.join(keys[:_SHOWN])}{more}"
