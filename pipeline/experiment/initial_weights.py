"""Initial weights from a checkpoint file or from another experiment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from pipeline.errors import InvalidExperiment, Problem, UnreadableFile, UsageError, nearest
from pipeline.experiment.pymodules.definitions import Components, ModuleDefinition, WeightSource
from pipeline.experiment.sharding import spread_like
from pipeline.paths import MODULE_CKPS, ExperimentPaths, check_name, pool_file, results_names
from pipeline.serialization.sharded_files import load_state, names_in

_SHOWN = 10
_FIX = "rename keys with strip_prefix or key_map in settings, or take only what both sides have with strict: False"
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "network", "net", "weights", "params")


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
    pool = check_name(str(source.ckp_pool_name), "ckp_pool_name")
    module = check_name(str(source.module_name), "module_name")
    path = pool_file(other.data, pool, module)
    if not other.results.is_dir():
        known = results_names(paths.home)
        listed = f"there are {', '.join(known) or 'none'}.{nearest(other.name, known)}"
        raise ValueError(f"load_weights_from_exp needs the results of experiment {other.name!r}; {listed}")
    if not path.exists():
        pools = sorted(entry.name for entry in (other.data / MODULE_CKPS).glob("*"))
        modules = names_in(path.parent)
        raise ValueError(
            f"load_weights_from_exp needs {path}, but experiment {source.exp_name!r} has the pools "
            f"{', '.join(pools) or 'none'}, and in {source.ckp_pool_name!r} the modules {', '.join(modules) or 'none'}."
        )
    return path


def _fill(definition: ModuleDefinition, source: WeightSource, path: Path) -> Iterator[str]:
    """Load a file into a module, or yield why it does not fit."""
    try:
        loaded = load_state(path)
        weights = _one_module(loaded, source.module_name if source.ckp_name else None, path)
        renamed = renamed_keys(weights, source.strip_prefix, source.key_map)
    except (UnreadableFile, ValueError) as error:
        yield str(error)
        return
    yield from _misfits(definition.module, renamed, source, path)


def _one_module(loaded: Any, module_name: str | None, path: Path) -> Mapping[Any, Any]:
    """Return the weights of one module out of all that a file holds."""
    if module_name is not None:
        return pick_module(loaded, module_name, path)
    modules = modules_in(loaded, path)
    if len(modules) > 1:
        raise ValueError(f"{path} holds the modules {', '.join(modules)}; choose one with module_name")
    return next(iter(modules.values()))


def pick_module(loaded: Any, name: str, path: Path) -> Mapping[Any, Any]:
    """Return a module by name: an entry that is a dict, or all entries whose keys begin with the name and a dot."""
    modules = modules_in(loaded, path)
    prefix = f"{name}."
    if isinstance(loaded.get(name), Mapping):
        return cast(Mapping[Any, Any], loaded[name])
    found = {str(key).removeprefix(prefix): one for key, one in loaded.items() if str(key).startswith(prefix)}
    if not found:
        known = [one for one in modules if one] or list(dict.fromkeys(str(key).split(".")[0] for key in loaded))
        listed = ", ".join(known[:_SHOWN]) or "none"
        raise ValueError(f"{path} has no module {name!r}; there are {listed}.{nearest(name, known)}")
    return found


def modules_in(loaded: Any, path: Path) -> dict[str, Mapping[Any, Any]]:
    """Return the weights a file holds by module; where it holds those of one without a name, the name is empty.

    Other trainers wrap the weights into an entry of a usual name, next to an optimizer and more.
    """
    if not isinstance(loaded, Mapping):
        raise ValueError(f"{path} must hold a dict of tensors, but holds {type(loaded).__name__}")
    weights = {str(key): value for key, value in loaded.items() if isinstance(value, Mapping) and _has_tensors(value)}
    wrapped = [key for key in _WRAPPERS if key in weights]
    # A module without weights is an empty dict; anything else shows that this is more than a file of modules.
    others = [value for key, value in loaded.items() if str(key) not in weights]
    has_more = any(not isinstance(value, Mapping) or len(value) > 0 for value in others)
    if wrapped and (len(weights) == 1 or (has_more and wrapped[0] == _WRAPPERS[0])):
        return {"": weights[wrapped[0]]}
    if not weights or _has_tensors(loaded):
        return {"": loaded}
    return weights if has_more else {str(key): value for key, value in loaded.items()}


def _has_tensors(value: Mapping[Any, Any]) -> bool:
    return any(isinstance(one, torch.Tensor) for one in value.values())


def renamed_keys(weights: Mapping[Any, Any], strip_prefix: str, key_map: Mapping[str, str]) -> dict[str, Any]:
    """Strip a prefix off every key, then rename keys by a map; two keys must not become one."""
    renamed: dict[str, Any] = {}
    for key, value in weights.items():
        name = _mapped(str(key).removeprefix(strip_prefix), key_map)
        if name in renamed:
            raise ValueError(f"strip_prefix and key_map must keep keys apart, but two of them become {name!r}")
        renamed[name] = value
    return renamed


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
    missing = sorted(set(own) - set(weights))
    unexpected = sorted(set(weights) - set(own))
    kinds = {"missing": missing, "unexpected": unexpected} if source.strict else {}
    found = [f"{kind} {_first(keys)}" for kind, keys in {**kinds, "differing shapes": shapes}.items() if keys]
    if found:
        listed = "".join(f"\n      {line}" for line in found)
        yield f"the weights of {path} must fit the module, but:{listed}\n    fix: {_FIX}"
        return
    try:
        fitting = {key: spread_like(own[key], weights[key]) for key in own if key in weights}
        module.load_state_dict(fitting, strict=source.strict)
    except RuntimeError as error:
        # Tensors of the right shape can still be of a kind that cannot be copied, such as quantised ones.
        yield f"the weights of {path} must fit the module, but: {' '.join(str(error).split())}"


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else f"of type {type(value).__name__}"


def _first(keys: list[str]) -> str:
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return f"({len(keys)}) {', '.join(keys[:_SHOWN])}{more}"
