"""The contracts of the pymodules: what each file must define, checked and put into typed values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn
from torch.utils.data import default_collate

from pipeline.errors import Problem, nearest
from pipeline.experiment.pymodules.contract_examples import BASES, EXAMPLES, required_methods
from pipeline.experiment.pymodules.definitions import (
    Components,
    DataCounter,
    DataLoading,
    DataTransforms,
    LoaderArguments,
    ModuleDefinition,
    ModuleTransformDefinition,
    OptimSched,
    WeightSource,
)

_UNSAFE_LOADER_ARGUMENTS = {
    "shuffle": "the epoch's plan shuffles",
    "sampler": "the epoch's plan chooses the points",
    "batch_sampler": "the epoch's plan makes the batches",
    "drop_last": "no item is ever dropped",
    "generator": "randomness is keyed",
    "worker_init_fn": "randomness is keyed",
    "collate_fn": "define collate_fn in the same file",
    "dataset": "the dataset of the same name is used",
}
_LOADER_ARGUMENT_TYPES: dict[str, tuple[type, ...]] = {
    "pin_memory": (bool,),
    "persistent_workers": (bool,),
    "timeout": (int, float),
}
_MODULE_SETTING_TYPES = {"frozen": bool, "compile": bool, "strict": bool, "strip_prefix": str, "key_map": dict}


class ContractReader:
    """Reads typed values out of imported pymodules and collects every broken contract."""

    def __init__(self, files: dict[str, dict[str, ModuleType]]) -> None:
        self._files = files
        self.problems: list[Problem] = []
        self.failed_families: set[str] = set()

    def read(self) -> Components:
        """Return the components; meaningful only if no problems were found."""
        return Components(
            datasets=self._family("datasets", self._dataset),
            data_counters=self._family("data_counters", self._data_counter),
            data_transforms=self._family("data_transforms", self._data_transforms),
            dataloaders=self._family("dataloaders", self._data_loading),
            modules=self._family("modules", self._module),
            module_transforms=self._family("module_transforms", self._module_transform),
            optim_sched=self._family("optim_sched", self._optim_sched),
            checkpoint_saver=self._single("checkpoint_saver"),
            early_stopper=self._single("early_stopper"),
            loss_weighter=self._single("loss_weighter"),
            trackers=self._family("trackers", self._tracker),
        )

    def _family(self, family: str, read: Callable[[ModuleType], Any]) -> dict[str, Any]:
        return {name: read(module) for name, module in self._files[family].items()}

    def _single(self, name: str) -> Any:
        module = self._files[""].get(name)
        return None if module is None else self._object(module, name)

    def _dataset(self, module: ModuleType) -> Any:
        return self._object(module, "dataset")

    def _data_counter(self, module: ModuleType) -> DataCounter:
        counter = self._object(module, "data_counter")
        return DataCounter(counter, self._names(module, "dataset_names"))

    def _data_transforms(self, module: ModuleType) -> DataTransforms:
        return DataTransforms(
            self._transform(module, "TrainDataTransform"), self._transform(module, "EvalDataTransform")
        )

    def _transform(self, module: ModuleType, name: str) -> Any:
        create = self._get(module, name)
        if create is None:
            return None
        try:
            transform = create()
        except (Exception, SystemExit) as error:
            return self._broken(module, name, f"must be creatable without arguments, but raises {error!r}")
        self._check_methods(module, name, transform)
        return transform

    def _data_loading(self, module: ModuleType) -> DataLoading:
        collate = getattr(module, "collate_fn", default_collate)
        if not callable(collate):
            self._broken(module, "collate_fn", f"must be a function of a list of points, but is {collate!r}")
        return DataLoading(
            self._loader_arguments(module, "train_dataloader_args"),
            self._loader_arguments(module, "eval_dataloader_args"),
            collate,
        )

    def _loader_arguments(self, module: ModuleType, name: str) -> Any:
        given = self._get(module, name)
        if not isinstance(given, Mapping):
            return self._broken(module, name, f"must be a dict, but is {given!r}") if given is not None else given
        known = [entry.name for entry in fields(LoaderArguments)]
        for key in sorted(set(given) - set(known), key=str):
            reason = _UNSAFE_LOADER_ARGUMENTS.get(key)
            what = f"is not allowed: {reason}" if reason else f"is unknown; allowed are {', '.join(known)}."
            self._broken(module, f"{name}[{key!r}]", what + ("" if reason else nearest(key, known)))
        for key, least in {"batch_size": 1, "num_workers": 0, "point_size": 1, "prefetch_factor": 1}.items():
            value = given.get(key, least)
            if value is None and key == "prefetch_factor":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                self._broken(module, f"{name}[{key!r}]", f"must be an integer of {least} or more, but is {value!r}")
        for key, kinds in _LOADER_ARGUMENT_TYPES.items():
            if key in given and not isinstance(given[key], kinds):
                self._broken(module, f"{name}[{key!r}]", f"has a wrong type: {given[key]!r}")
        if isinstance(given.get("timeout"), (int, float)) and given["timeout"] < 0:
            self._broken(module, f"{name}['timeout']", f"must be 0 or more, but is {given['timeout']!r}")
        if given.get("multiprocessing_context") not in (None, "fork"):
            self._broken(
                module, f"{name}['multiprocessing_context']", "must be 'fork': workers share imported pymodules"
            )
        if "batch_size" not in given:
            return self._broken(module, f"{name}['batch_size']", "is missing")
        return LoaderArguments(**{key: given[key] for key in known if key in given})

    def _module(self, module: ModuleType) -> ModuleDefinition:
        network = self._get(module, "module")
        if network is not None and not isinstance(network, nn.Module):
            self._broken(module, "module", f"must be a torch.nn.Module, but is {network!r}")
        given = self._get(module, "settings")
        if not isinstance(given, Mapping):
            given = {} if given is None else self._broken(module, "settings", f"must be a dict, but is {given!r}") or {}
        known = [
            "frozen",
            "compile",
            "load_weights_from_ckp",
            "load_weights_from_exp",
            "strict",
            "strip_prefix",
            "key_map",
            "shard",
        ]
        for key in sorted(set(given) - set(known), key=str):
            self._broken(
                module, f"settings[{key!r}]", f"is unknown; allowed are {', '.join(known)}.{nearest(key, known)}"
            )
        for key, kind in _MODULE_SETTING_TYPES.items():
            if key in given and not isinstance(given[key], kind):
                self._broken(module, f"settings[{key!r}]", f"must be of type {kind.__name__}, but is {given[key]!r}")
        frozen = bool(given.get("frozen", False))
        compiled = bool(given.get("compile", False))
        return ModuleDefinition(
            network, frozen, compiled, self._weight_source(module, given), self._shard_patterns(module, given)
        )

    def _shard_patterns(self, module: ModuleType, given: Mapping[str, Any]) -> tuple[str, ...] | None:
        patterns = given.get("shard")
        if patterns is None:
            return None
        if not isinstance(patterns, (list, tuple)) or not all(isinstance(one, str) for one in patterns):
            what = f"must be a list of names of submodules, in which * stands for anything, but is {patterns!r}"
            self._broken(module, "settings['shard']", what)
            return None
        return tuple(patterns)

    def _weight_source(self, module: ModuleType, given: Mapping[str, Any]) -> Any:
        renaming = {key: given[key] for key in ("strict", "strip_prefix", "key_map") if key in given}
        ckp = given.get("load_weights_from_ckp")
        exp = given.get("load_weights_from_exp")
        if ckp and exp:
            self._broken(module, "settings", "must have load_weights_from_ckp or load_weights_from_exp, but has both")
        needed = ["ckp_name"] if ckp else ["exp_name", "ckp_pool_name", "module_name"]
        # A file may hold several modules.
        optional = ["module_name"] if isinstance(ckp, Mapping) and "module_name" in ckp else []
        source = ckp or exp
        if not source:
            return None
        allowed = [*needed, *optional, "strict", "strip_prefix", "key_map"]
        is_named = isinstance(source, Mapping) and all(isinstance(source.get(key), str) for key in [*needed, *optional])
        if not is_named or set(source) - set(allowed):
            return self._broken(
                module, "settings", f"weights must come from a dict of {', '.join(needed)}, but it is {source!r}"
            )
        return WeightSource(**{**renaming, **source})

    def _module_transform(self, module: ModuleType) -> ModuleTransformDefinition:
        create = self._get(module, "ModuleTransform")
        if create is not None and not takes(create, 3):
            self._broken(
                module, "ModuleTransform", "must be creatable as ModuleTransform(data_counters, device, logger)"
            )
        elif inspect.isclass(create) and not takes(inspect.getattr_static(create, "__call__", list), 3):
            self._broken(module, "ModuleTransform", "must have a method __call__(self, batch, modules)")
        elif hasattr(create, "images") and not takes(create.images, 3):
            self._broken(module, "ModuleTransform", "images must be a method images(self, batch, modules)")
        return ModuleTransformDefinition(create, self._names(module, "loss_registers"))

    def _tracker(self, module: ModuleType) -> Any:
        return self._object(module, "tracker")

    def _optim_sched(self, module: ModuleType) -> OptimSched:
        start = getattr(module, "scheduler_start_epoch", 1)
        if not isinstance(start, int) or start < 1:
            self._broken(module, "scheduler_start_epoch", f"must be an integer of 1 or more, but is {start!r}")
        return OptimSched(
            self._function(module, "create_optimizer", "modules"),
            self._function(module, "create_scheduler", "optimizer"),
            start,
        )

    def _function(self, module: ModuleType, name: str, argument: str) -> Any:
        function = self._get(module, name)
        if function is not None and not takes(function, 1):
            found = f"{name}{inspect.signature(function)}" if callable(function) else repr(function)
            self._broken(module, name, f"must be a function {name}({argument}), but is {found}")
        return function

    def _names(self, module: ModuleType, name: str) -> tuple[str, ...]:
        value = self._get(module, name)
        if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(one, str) for one in value):
            if value is not None:
                self._broken(module, name, f"must be a list of names, but is {value!r}")
            return ()
        return tuple(value)

    def _object(self, module: ModuleType, name: str) -> Any:
        value = self._get(module, name)
        if value is not None:
            self._check_methods(module, name, value)
        return value

    def _check_methods(self, module: ModuleType, name: str, value: Any) -> None:
        if inspect.isclass(value):
            self._broken(
                module, name, f"must be an instance, but is the class {value.__name__}; write {value.__name__}(…)"
            )
            return
        required = required_methods(name)
        methods = {method: getattr(value, method, None) for method in required}
        lacking = [f"{method}({', '.join(required[method])})" for method, one in methods.items() if not callable(one)]
        if lacking:
            what = f"must have the methods {', '.join(lacking)}, but {type(value).__name__} has not"
            self._broken(
                module, name, what, f"inherit from pipeline.components.{BASES[name].__name__}, which has them all"
            )
        for method, function in methods.items():
            arguments = required[method]
            if callable(function) and not takes(function, len(arguments)):
                found = f"{method}{inspect.signature(function)}"
                must = f"must take {len(arguments)} arguments: {method}({', '.join(arguments)})"
                self._broken(module, name, f"{found} {must}")

    def _get(self, module: ModuleType, name: str) -> Any:
        if not hasattr(module, name):
            defined = [word for word in vars(module) if not word.startswith("_") and word not in EXAMPLES]
            self._broken(module, name, f"is not defined.{nearest(name, defined)}", EXAMPLES[name])
        elif getattr(module, name) is None:
            self._broken(module, name, "must not be None")
        return getattr(module, name, None)

    def _broken(self, module: ModuleType, name: str, what: str, fix: str = "") -> Any:
        path = Path(str(module.__file__))
        self.problems.append(Problem(place_of(path, name), f"{name} {what}", fix))
        self.failed_families.add(path.parent.name)
        return None


def takes(function: Callable[..., Any], count: int) -> bool:
    """Return whether a function can be called with so many arguments."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def place_of(path: Path, name: str) -> str:
    """Return ``file:line`` where a top-level name is set, or the file alone."""
    word = name.partition("[")[0]
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        if line.split("(")[0].split(":")[0].split("=")[0].split() in ([word], ["def", word], ["class", word]):
            return f"{path}:{number}"
    return str(path)
