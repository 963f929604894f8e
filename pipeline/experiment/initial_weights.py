"""Initial weights from a checkpoint file or from another experiment."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from pipeline.command_lines import verb_line
from pipeline.errors import InvalidExperiment, Problem, UnreadableFile, UsageError, nearest
from pipeline.experiment.constant_parameters import source_name
from pipeline.experiment.pymodules.definitions import Components, ModuleDefinition, WeightSource
from pipeline.experiment.settings.settings import TrainingSettings
from pipeline.experiment.sharding import spread_like
from pipeline.paths import CONSTANT, MODULE_CKPS, ExperimentPaths, check_name, pool_file, results_names
from pipeline.serialization.sharded_files import load_state, names_in
from pipeline.serialization.torch_files import put_together

# What a file holds: dicts of tensors, whose keys are names or, in files of others, anything else.
Weights = Mapping[object, object]
_MAX_KEYS_SHOWN = 10
_FIX = "rename keys with strip_prefix or key_map in settings, or take only what both sides have with strict: False"
# Names under which other trainers save the weights next to an optimizer and more; the first one that is there counts.
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "network", "net", "weights", "params")


def load_initial_weights(
    components: Components, paths: ExperimentPaths, folder: Path, training: TrainingSettings
) -> None:
    """Fill every module that names a source, or for which the settings name one; all problems are raised together."""
    problems = [*_unknown_modules(components, training), *_fill_all(components.modules, paths, folder, training)]
    if problems:
        raise InvalidExperiment(problems)


def rebuild_modules(
    modules: Mapping[str, ModuleDefinition],
    rebuilt: Collection[str],
    paths: ExperimentPaths,
    folder: Path,
    training: TrainingSettings,
) -> None:
    """Fill modules whose commits leave parameters out with what they began with; averages of them, too."""
    sources = dict.fromkeys(source_name(modules, name) for name in rebuilt)
    problems = [
        replace(problem, what=f'save: "trained" needs what this module began with, but {problem.what}')
        for problem in _fill_all({name: modules[name] for name in sources}, paths, folder, training)
    ]
    if problems:
        raise InvalidExperiment(problems)
    for name in rebuilt:
        source = modules[source_name(modules, name)]
        if source is not modules[name]:
            modules[name].module.load_state_dict(source.module.state_dict())


def _fill_all(
    modules: Mapping[str, ModuleDefinition], paths: ExperimentPaths, folder: Path, training: TrainingSettings
) -> Iterator[Problem]:
    """Fill the modules that have a source, and yield what is wrong with it."""
    for name, definition in modules.items():
        source = _source_of(name, definition, training)
        # An average starts as a copy of its source.
        if source is None or definition.average is not None:
            continue
        where = str(folder / "modules" / f"{name}.py")
        try:
            path = _source_file(source, paths)
            loaded = _load(source, path, paths)
            # A file that the author provides may hold several modules; one of another experiment holds one.
            if source.file is not None:
                weights = _pick_or_only(loaded, name, path, may_be_alone=name in training.module_weights)
            elif source.ckp_name and source.module_name is not None:
                weights = pick_module(loaded, source.module_name, path)
            else:
                entries = modules_in(loaded, path)
                if len(entries) > 1:
                    raise ValueError(f"{path} holds the modules {', '.join(entries)}; choose one with module_name")
                weights = next(iter(entries.values()))
            renamed = renamed_keys(weights, source.strip_prefix, source.key_map)
        except (UnreadableFile, UsageError, ValueError) as error:
            yield Problem(where, str(error))
            continue
        mismatch = _fill(definition.module, renamed, source, path)
        if mismatch:
            yield Problem(where, mismatch)


def _unknown_modules(components: Components, training: TrainingSettings) -> Iterator[Problem]:
    known = list(components.modules)
    for name in sorted(set(training.module_weights) - set(known)):
        what = f"module_weights has {name!r}, but the modules are {', '.join(known)}.{nearest(name, known)}"
        yield Problem("settings/training.json", what)


def _source_of(name: str, definition: ModuleDefinition, training: TrainingSettings) -> WeightSource | None:
    """Return where a module starts from: what the settings say of it, else its own file, else the file for all."""
    own = definition.source or WeightSource()
    if name in training.module_weights:
        return WeightSource(
            file=training.module_weights[name], strict=own.strict, strip_prefix=own.strip_prefix, key_map=own.key_map
        )
    if definition.source is None and training.init_from is not None:
        return WeightSource(file=training.init_from)
    return definition.source


def describe_source(name: str, definition: ModuleDefinition, training: TrainingSettings) -> str:
    """Return where a module starts from, in words."""
    source = _source_of(name, definition, training)
    if source is None:
        return f"pymodules/modules/{name}.py"
    if source.file is not None:
        return f"the file {source.file}"
    if source.ckp_name is not None:
        return f"the file {source.ckp_name} (load_weights_from_ckp)"
    return f"{source.exp_name}:{source.ckp_pool_name}:{source.module_name} (load_weights_from_exp)"


def _load(source: WeightSource, path: Path, paths: ExperimentPaths) -> object:
    """Return what a source holds; of another experiment's module also what all of its pools have in common."""
    if source.file is not None or source.ckp_name is not None:
        return load_state(path)
    constant = path.parents[1] / CONSTANT / f"{source.module_name}.pt"
    if constant.with_suffix(".json").is_file():
        module = f"{source.exp_name}:{source.ckp_pool_name}:{source.module_name}"
        folder = paths.module_ckps
        line = verb_line("export", module, paths.home, "--out", str(folder / f"{source.module_name}.pt"))
        make_folder = "" if folder.is_dir() else f"mkdir -p {shlex.quote(str(folder))} && "
        raise ValueError(
            f'{module} has save: "trained", so {path} holds a part of its weights only\n    fix: {make_folder}{line}\n'
            f"      and then start from that file: load_weights_from_ckp with ckp_name {source.module_name!r}"
        )
    return put_together(load_state(constant), load_state(path)) if constant.is_file() else load_state(path)


def _pick_or_only(loaded: object, name: str, path: Path, *, may_be_alone: bool) -> Weights:
    """Return a module of a file by name, or the only one if the file was named for this module."""
    modules = modules_in(loaded, path)
    if may_be_alone and len(modules) == 1:
        return next(iter(modules.values()))
    return pick_module(loaded, name, path)


def _source_file(source: WeightSource, paths: ExperimentPaths) -> Path:
    """Return the file or folder of shards that a source names, or raise what there is instead."""
    if source.file is not None:
        # As a person on a command line would name it: from here, or from the folder for such files.
        candidates = (Path(source.file), paths.module_ckps / source.file)
        path = next((candidate for candidate in candidates if candidate.is_file()), None)
        if path is None:
            raise ValueError(f"weights must come from a file, but {' and '.join(map(str, candidates))} are none")
        return path
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
        pools = sorted(entry.name for entry in (other.data / MODULE_CKPS).glob("*") if entry.name != CONSTANT)
        modules = names_in(path.parent)
        raise ValueError(
            f"load_weights_from_exp needs {path}, but experiment {source.exp_name!r} has the pools "
            f"{', '.join(pools) or 'none'}, and in {source.ckp_pool_name!r} the modules {', '.join(modules) or 'none'}."
        )
    return path


def pick_module(loaded: object, name: str, path: Path) -> Weights:
    """Return a module by name: an entry that is a dict, or all entries whose keys begin with the name and a dot."""
    content = _check_dict(loaded, path)
    entry = content.get(name)
    if isinstance(entry, Mapping):
        return entry
    # A safetensors file is flat: the name of the module begins each key.
    prefix = f"{name}."
    weights: dict[object, object] = {
        str(key).removeprefix(prefix): value for key, value in content.items() if str(key).startswith(prefix)
    }
    if not weights:
        modules = [module for module in modules_in(loaded, path) if module]
        known = modules or list(dict.fromkeys(str(key).split(".")[0] for key in content))
        listed = ", ".join(known[:_MAX_KEYS_SHOWN]) or "none"
        raise ValueError(f"{path} has no module {name!r}; there are {listed}.{nearest(name, known)}")
    return weights


def modules_in(loaded: object, path: Path) -> dict[str, Weights]:
    """Return the weights of a file by module; the weights of a single module without a name have an empty name."""
    content = _check_dict(loaded, path)
    weights: dict[str, Weights] = {
        str(key): value for key, value in content.items() if isinstance(value, Mapping) and _has_tensors(value)
    }
    # A module without weights is an empty dict. Anything else shows that this is more than a file of modules.
    others = [value for key, value in content.items() if str(key) not in weights]
    has_more = any(not isinstance(value, Mapping) or len(value) > 0 for value in others)
    wrapped = [key for key in _WRAPPERS if key in weights]
    # With other dicts of tensors next to it, only "state_dict" is surely a wrapper: modules may be called "net".
    if wrapped and (len(weights) == 1 or (has_more and wrapped[0] == _WRAPPERS[0])):
        return {"": weights[wrapped[0]]}
    if not weights or _has_tensors(content):
        return {"": content}
    if has_more:
        return weights
    return {str(key): value for key, value in content.items() if isinstance(value, Mapping)}


def _check_dict(loaded: object, path: Path) -> Weights:
    if not isinstance(loaded, Mapping):
        raise ValueError(f"{path} must hold a dict of tensors, but holds {type(loaded).__name__}")
    return loaded


def _has_tensors(content: Weights) -> bool:
    return any(isinstance(value, torch.Tensor) for value in content.values())


def renamed_keys(weights: Weights, strip_prefix: str, key_map: Mapping[str, str]) -> dict[str, object]:
    """Strip a prefix off every key, then rename keys by a map; two keys must not become one."""
    renamed: dict[str, object] = {}
    for key, value in weights.items():
        name = str(key).removeprefix(strip_prefix)
        # A whole name is the longest prefix that a key can have, so it takes precedence.
        longest = max((prefix for prefix in key_map if name.startswith(prefix)), key=len, default="")
        if longest:
            name = key_map[longest] + name.removeprefix(longest)
        if name in renamed:
            raise ValueError(f"strip_prefix and key_map must keep keys apart, but two of them become {name!r}")
        renamed[name] = value
    return renamed


def _fill(module: nn.Module, weights: Mapping[str, object], source: WeightSource, path: Path) -> str:
    """Load weights into a module, or return why they do not fit."""
    current = module.state_dict()
    # Compared before anything is loaded: torch copies what fits before it raises, and lists every key.
    shapes = [
        f"{key} {_shape(weights[key])} instead of {_shape(current[key])}"
        for key in sorted(set(current) & set(weights))
        if isinstance(current[key], torch.Tensor) and _shape(current[key]) != _shape(weights[key])
    ]
    mismatches = {"differing shapes": shapes}
    if source.strict:
        missing = sorted(set(current) - set(weights))
        unexpected = sorted(set(weights) - set(current))
        mismatches = {"missing": missing, "unexpected": unexpected, **mismatches}
    lines = ""
    for kind, keys in mismatches.items():
        if keys:
            more = f" and {len(keys) - _MAX_KEYS_SHOWN} more" if len(keys) > _MAX_KEYS_SHOWN else ""
            lines += f"\n      {kind} ({len(keys)}) {', '.join(keys[:_MAX_KEYS_SHOWN])}{more}"
    if lines:
        return f"the weights of {path} must fit the module, but:{lines}\n    fix: {_FIX}"
    try:
        fitting = {key: spread_like(current[key], weights[key]) for key in current if key in weights}
        module.load_state_dict(fitting, strict=source.strict)
    except (RuntimeError, ValueError) as error:
        # Tensors of the right shape can still be of a kind that cannot be copied, such as quantised ones. An author's
        # set_extra_state may refuse what it is given.
        return f"the weights of {path} must fit the module, but: {' '.join(str(error).split())}"
    return ""


def _shape(value: object) -> str:
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else f"of type {type(value).__name__}"
