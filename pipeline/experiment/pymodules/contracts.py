"""The contracts of the pymodules: what each file must define, checked and put into typed values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from pipeline.components import BaseDataTransform, BaseHook, BaseScheduler
from pipeline.components.hooks import MOMENTS, is_overridden
from pipeline.errors import Problem, nearest
from pipeline.experiment.pymodules.assumptions import Assumption
from pipeline.experiment.pymodules.averages import AVERAGE_SETTINGS, average_problems, build_averages, read_average
from pipeline.experiment.pymodules.contract_examples import BASES, EXAMPLES, required_methods
from pipeline.experiment.pymodules.definitions import (
    Components,
    DataCounter,
    DataLoading,
    DataTransforms,
    LoaderArguments,
    MetricDefinition,
    ModuleDefinition,
    ModuleTransformDefinition,
    OptimSched,
    WeightSource,
    has_own_call,
)
from pipeline.experiment.pymodules.loader_arguments import read_loader_arguments
from pipeline.experiment.pymodules.source_files import COMPONENT_NAME
from pipeline.experiment.pymodules.user_code import place_of

# What is known of an author's value before its contract was checked: nothing.
AuthorValue = Any
_WEIGHT_SETTING_TYPES = {"strict": bool, "strip_prefix": str, "key_map": dict}
_MODULE_SETTING_TYPES = {"frozen": bool, "compile": bool, **_WEIGHT_SETTING_TYPES}
_MODULE_SETTINGS = (
    "frozen",
    "compile",
    "load_weights_from_ckp",
    "load_weights_from_exp",
    "strict",
    "strip_prefix",
    "key_map",
    "shard",
    "save",
)
_SAVED = ("all", "trained")


# The methods of a loss that couples all rows of a step, with what they take.
_WHOLE_STEP = {"embed": "batch, modules", "loss": "rows, modules"}
# How much a name must be like another one to be taken for a slip of the pen.
_MISSPELT = 0.8


def _create_no_scheduler(optimizer: Optimizer) -> BaseScheduler:
    return BaseScheduler()


class ContractReader:
    """Reads typed values out of imported pymodules and collects every broken contract."""

    def __init__(self, files: dict[str, dict[str, ModuleType]]) -> None:
        self._files = files
        self.problems: list[Problem] = []
        self.failed_families: set[str] = set()
        # What stands for names that files leave out.
        self.assumptions: list[Assumption] = []

    def read(self) -> Components:
        """Return the components; meaningful only if no problems were found."""
        files = self._files
        return Components(
            datasets={name: self._read_object(module, "dataset") for name, module in files["datasets"].items()},
            data_counters={
                name: DataCounter(self._read_object(module, "data_counter"), self._read_names(module, "dataset_names"))
                for name, module in files["data_counters"].items()
            },
            data_transforms={
                name: DataTransforms(
                    self._create_transform(module, "TrainDataTransform"),
                    self._create_transform(module, "EvalDataTransform"),
                )
                for name, module in files["data_transforms"].items()
            },
            dataloaders={name: self._read_loading(module) for name, module in files["dataloaders"].items()},
            modules=self.read_modules(),
            module_transforms={
                name: self._read_module_transform(module) for name, module in files["module_transforms"].items()
            },
            optim_sched={name: self._read_optim_sched(module) for name, module in files["optim_sched"].items()},
            checkpoint_saver=self._read_single("checkpoint_saver"),
            early_stopper=self._read_single("early_stopper"),
            loss_weighter=self._read_single("loss_weighter"),
            trackers={name: self._read_object(module, "tracker") for name, module in files["trackers"].items()},
            metrics=self.read_metrics(),
            hooks=self._read_hooks(files["hooks"]),
        )

    def read_metrics(self) -> dict[str, MetricDefinition]:
        """Return the metrics alone; meaningful only if no problems were found."""
        return {name: self._read_metric(name, module) for name, module in self._files["metrics"].items()}

    def _create_transform(self, module: ModuleType, name: str) -> AuthorValue:
        create = self._get_or_assume(module, name, BaseDataTransform, "points stay as they are")
        if create is None:
            return None
        try:
            transform = create()
        except (Exception, SystemExit) as error:
            self._report(module, name, f"must be creatable without arguments, but raises {error!r}")
            return None
        self._check_methods(module, name, transform)
        return transform

    def _read_loading(self, module: ModuleType) -> DataLoading:
        collate = getattr(module, "collate_fn", default_collate)
        if not callable(collate):
            self._report(module, "collate_fn", f"must be a function of a list of points, but is {collate!r}")
        train = self._read_loader_arguments(module, "train_dataloader_args", {}, "{}")
        # What an evaluation loads is most often loaded in the same way.
        like_train = getattr(module, "train_dataloader_args", {})
        evaluated = self._read_loader_arguments(module, "eval_dataloader_args", like_train, "train_dataloader_args")
        return DataLoading(train, evaluated, collate)

    def _read_loader_arguments(
        self, module: ModuleType, name: str, default: AuthorValue, default_words: str
    ) -> LoaderArguments:
        given = self._get_or_assume(module, name, default, default_words)
        if given is None:
            # Nothing is loaded: the problem is raised before.
            return LoaderArguments()
        if isinstance(given, Mapping) and "batch_size" not in given:
            self._assume(module, f"{name}['batch_size']", str(LoaderArguments.batch_size))
        return read_loader_arguments(given, name, partial(self._report, module))

    def read_modules(self) -> dict[str, ModuleDefinition]:
        """Return the modules alone; meaningful only if no problems were found."""
        files = self._files["modules"]
        modules = {name: self._read_module(module) for name, module in files.items()}
        for name, what, fix in average_problems(modules):
            self._report(files[name], "settings", what, fix)

        def report(name: str, what: str) -> None:
            self._report(files[name], "settings", what)

        return build_averages(modules, report)

    def _read_module(self, module: ModuleType) -> ModuleDefinition:
        given = getattr(module, "settings", None)
        average = read_average(given, hasattr(module, "module"), partial(self._report, module))
        if average is not None:
            # A copy of its source is put in its place once all modules are there.
            return ModuleDefinition(nn.Module(), average=average)
        network = self._get(module, "module")
        if network is not None and not isinstance(network, nn.Module):
            fix = f"write {network.__name__}(…)" if inspect.isclass(network) else ""
            self._report(module, "module", f"must be a torch.nn.Module, but is {network!r}", fix)
        given = self._get_or_assume(module, "settings", {}, "{}, so the module is trained")
        if not isinstance(given, Mapping):
            if given is not None:
                self._report(module, "settings", f"must be a dict, but is {given!r}")
            given = {}
        for key in sorted(set(given) - {*_MODULE_SETTINGS, *AVERAGE_SETTINGS}, key=str):
            what = f"is unknown; allowed are {', '.join(_MODULE_SETTINGS)}.{nearest(str(key), _MODULE_SETTINGS)}"
            self._report(module, f"settings[{key!r}]", what)
        for key, kind in _MODULE_SETTING_TYPES.items():
            if key in given and not isinstance(given[key], kind):
                self._report(module, f"settings[{key!r}]", f"must be of type {kind.__name__}, but is {given[key]!r}")
        if (saved := given.get("save", "all")) not in _SAVED:
            self._report(module, "settings['save']", f'must be "all" or "trained", but is {saved!r}')
        # None and an empty list differ: a frozen module is sharded only where its author asks for it.
        patterns = given.get("shard")
        if patterns is not None and not _is_list_of_names(patterns):
            what = f"must be a list of names of submodules, in which * stands for anything, but is {patterns!r}"
            self._report(module, "settings['shard']", what)
            patterns = None
        return ModuleDefinition(
            network,
            frozen=bool(given.get("frozen", False)),
            compile=bool(given.get("compile", False)),
            source=self._read_weight_source(module, given),
            shard=None if patterns is None else tuple(patterns),
            saves_trained_only=saved == "trained",
        )

    def _read_weight_source(self, module: ModuleType, given: Mapping[str, AuthorValue]) -> WeightSource | None:
        ckp = given.get("load_weights_from_ckp")
        exp = given.get("load_weights_from_exp")
        if ckp and exp:
            self._report(module, "settings", "must have load_weights_from_ckp or load_weights_from_exp, but has both")
        source = ckp or exp
        if not source:
            return None
        required = ["ckp_name"] if ckp else ["exp_name", "ckp_pool_name", "module_name"]
        names = list(required)
        # A file may hold several modules.
        if isinstance(ckp, Mapping) and "module_name" in ckp:
            names.append("module_name")
        has_names = isinstance(source, Mapping) and all(isinstance(source.get(key), str) for key in names)
        if not has_names or set(source) - {*names, *_WEIGHT_SETTING_TYPES}:
            what = f"weights must come from a dict of {', '.join(required)}, but it is {source!r}"
            self._report(module, "settings", what)
            return None
        # How keys are renamed may stand in the settings or next to the names, which takes precedence.
        renaming = {key: given[key] for key in _WEIGHT_SETTING_TYPES if key in given}
        return WeightSource(**{**renaming, **source})

    def _read_module_transform(self, module: ModuleType) -> ModuleTransformDefinition:
        # It is created once the counters have counted, so only its signatures can be checked here.
        create = self._get(module, "ModuleTransform")
        if create is not None and not takes(create, 3):
            what = "must be creatable as ModuleTransform(data_counters, device, logger)"
            self._report(module, "ModuleTransform", what)
        elif inspect.isclass(create) and (problem := _whole_step_problem(create)):
            self._report(module, "ModuleTransform", *problem)
        elif inspect.isclass(create) and not takes(inspect.getattr_static(create, "__call__", list), 3):
            self._report(module, "ModuleTransform", "must have a method __call__(self, batch, modules)")
        elif hasattr(create, "images") and not takes(create.images, 3):
            self._report(module, "ModuleTransform", "images must be a method images(self, batch, modules)")
        elif hasattr(create, "artifacts") and not takes(create.artifacts, 4):
            what = "artifacts must be a method artifacts(self, batch, modules, folder)"
            self._report(module, "ModuleTransform", what)
        elif hasattr(create, "count_items") and not takes(create.count_items, 2):
            self._report(module, "ModuleTransform", "count_items must be a method count_items(self, batch)")
        metrics = self._read_names(module, "metrics") if hasattr(module, "metrics") else ()
        return ModuleTransformDefinition(create, self._read_names(module, "loss_registers"), metrics)

    def _read_metric(self, name: str, module: ModuleType) -> MetricDefinition:
        metric = self._get(module, "metric")
        lacking = [method for method in ("update", "compute") if not callable(getattr(metric, method, None))]
        if inspect.isclass(metric):
            what = f"must be an instance, but is the class {metric.__name__}; write {metric.__name__}(…)"
            self._report(module, "metric", what)
        elif metric is not None and lacking:
            what = f"must have the methods {', '.join(lacking)}, but {type(metric).__name__} lacks them"
            self._report(module, "metric", what, "inherit from pipeline.components.BaseMetric")
        names = self._read_names(module, "names") if hasattr(module, "names") else (name,)
        for register in names:
            if not COMPONENT_NAME.fullmatch(register):
                what = f"must be made of letters, digits, '_', '-' and '.', but has {register!r}"
                self._report(module, "names", what)
        return MetricDefinition(metric, names, self._read_directions(module, metric, names))

    def _read_directions(self, module: ModuleType, metric: AuthorValue, names: tuple[str, ...]) -> dict[str, str]:
        """Return which way each value of a metric is better: as the file says, or as the metric itself knows."""
        given = getattr(module, "direction", None)
        if given is None:
            # torchmetrics knows it of most of its metrics.
            is_higher_better = getattr(metric, "higher_is_better", None)
            given = getattr(metric, "direction", None)
            if given is None and is_higher_better is not None:
                given = "max" if is_higher_better else "min"
            if given is None:
                self._assume(module, "direction", '"max"')
                given = "max"
        directions = {name: given.get(name) if isinstance(given, Mapping) else given for name in names}
        for name, direction in directions.items():
            if direction not in ("min", "max"):
                self._report(module, "direction", f'must be "min" or "max" for {name!r}, but is {direction!r}')
        return {name: "min" if direction == "min" else "max" for name, direction in directions.items()}

    def _read_hooks(self, files: Mapping[str, ModuleType]) -> dict[str, BaseHook]:
        hooks: dict[str, BaseHook] = {}
        for name, module in files.items():
            hook = self._read_object(module, "hook")
            shared = [other for other, known in hooks.items() if known is hook and hook is not None]
            if shared:
                what = f"must be an object of its own, but is that of hooks/{shared[0]}.py, which has one state"
                self._report(module, "hook", what, f"write {type(hook).__name__}(…) here, too")
            hooks[name] = hook
            if hook is None or inspect.isclass(hook):
                continue
            for moment in MOMENTS:
                method = getattr(hook, moment, None)
                if method is not None and not takes(method, 1):
                    self._report(module, "hook", f"{moment} must take one argument: {moment}(state)")
            if not any(is_overridden(hook, moment) for moment in MOMENTS):
                own = [word for word in vars(type(hook)) if not word.startswith("_") and word not in ("save", "load")]
                near = nearest(own[0], MOMENTS) if own else ""
                what = f"must define one of {', '.join(MOMENTS)}, but {type(hook).__name__} has none of them.{near}"
                self._report(module, "hook", what)
        return hooks

    def _read_optim_sched(self, module: ModuleType) -> OptimSched:
        counts = {name: getattr(module, name, 1) for name in ("scheduler_start_epoch", "every_steps")}
        for name, value in counts.items():
            if type(value) is not int or value < 1:
                self._report(module, name, f"must be an integer of 1 or more, but is {value!r}")
                counts[name] = 1
        clip_norm = getattr(module, "grad_clip_norm", None)
        if clip_norm is not None and (not isinstance(clip_norm, (int, float)) or not clip_norm > 0):
            self._report(module, "grad_clip_norm", f"must be a number greater than 0, but is {clip_norm!r}")
            clip_norm = None
        return OptimSched(
            self._check_function(module, "create_optimizer", "modules", self._get(module, "create_optimizer")),
            self._check_function(
                module,
                "create_scheduler",
                "optimizer",
                self._get_or_assume(module, "create_scheduler", _create_no_scheduler, "learning rates stay constant"),
            ),
            loss_registers=self._read_names(module, "loss_registers") if hasattr(module, "loss_registers") else None,
            grad_clip_norm=clip_norm,
            **counts,
        )

    def _check_function(self, module: ModuleType, name: str, argument: str, function: AuthorValue) -> AuthorValue:
        if function is not None and not takes(function, 1):
            actual = f"{name}{inspect.signature(function)}" if callable(function) else repr(function)
            self._report(module, name, f"must be a function {name}({argument}), but is {actual}")
        return function

    def _read_names(self, module: ModuleType, name: str) -> tuple[str, ...]:
        value = self._get(module, name)
        if value is None:
            return ()
        if not _is_list_of_names(value):
            self._report(module, name, f"must be a list of names, but is {value!r}")
            return ()
        return tuple(value)

    def _read_object(self, module: ModuleType, name: str) -> AuthorValue:
        value = self._get(module, name)
        if value is not None:
            self._check_methods(module, name, value)
        return value

    def _read_single(self, name: str) -> AuthorValue:
        # A file that could not be imported was reported by the loader.
        module = self._files[""].get(name)
        return None if module is None else self._read_object(module, name)

    def _check_methods(self, module: ModuleType, name: str, value: object) -> None:
        """Report methods that are missing or take other arguments; inheriting from the base class is not required."""
        if inspect.isclass(value):
            what = f"must be an instance, but is the class {value.__name__}; write {value.__name__}(…)"
            self._report(module, name, what)
            return
        required = required_methods(name)
        methods = {method: getattr(value, method, None) for method in required}
        lacking = [
            f"{method}({', '.join(required[method])})" for method, function in methods.items() if not callable(function)
        ]
        if lacking:
            what = f"must have the methods {', '.join(lacking)}, but {type(value).__name__} has not"
            fix = f"inherit from pipeline.components.{BASES[name].__name__}, which has them all"
            self._report(module, name, what, fix)
        for method, function in methods.items():
            arguments = required[method]
            if callable(function) and not takes(function, len(arguments)):
                must = f"must take {len(arguments)} arguments: {method}({', '.join(arguments)})"
                self._report(module, name, f"{method}{inspect.signature(function)} {must}")

    def _get(self, module: ModuleType, name: str) -> AuthorValue:
        """Return what a file defines under a name; a name without a value is reported, and gives None."""
        if not hasattr(module, name):
            defined = [word for word in vars(module) if not word.startswith("_") and word not in EXAMPLES]
            self._report(module, name, f"is not defined.{nearest(name, defined)}", EXAMPLES[name])
        elif getattr(module, name) is None:
            self._report(module, name, "must not be None")
        return getattr(module, name, None)

    def _get_or_assume(self, module: ModuleType, name: str, default: AuthorValue, words: str) -> AuthorValue:
        """Return what a file defines under a name that it may leave out, unless it has misspelt it."""
        if hasattr(module, name) or self._has_misspelt(module, name):
            return self._get(module, name)
        self._assume(module, name, words)
        return default

    @staticmethod
    def _has_misspelt(module: ModuleType, name: str) -> bool:
        defined = [word for word in vars(module) if not word.startswith("_") and word not in EXAMPLES]
        return bool(get_close_matches(name, defined, n=1, cutoff=_MISSPELT))

    def _assume(self, module: ModuleType, name: str, words: str) -> None:
        path = Path(str(module.__file__))
        self.assumptions.append(Assumption(f"pymodules/{path.parent.name}/{path.name}", f"{name}: {words}"))

    def _report(self, module: ModuleType, name: str, what: str, fix: str = "") -> None:
        path = Path(str(module.__file__))
        self.problems.append(Problem(place_of(path, name), f"{name} {what}", fix))
        self.failed_families.add(path.parent.name)


def _whole_step_problem(create: type) -> tuple[str, str] | None:
    """Return what is wrong with a module transform that has methods of a whole-step loss, and how to repair it."""
    has_call = has_own_call(create)
    present = [method for method in _WHOLE_STEP if hasattr(create, method)]
    if len(present) < len(_WHOLE_STEP):
        if has_call or not present:
            # With a __call__, one of the two names is free for what an author likes.
            return None
        (lacking,) = set(_WHOLE_STEP) - set(present)
        fix = f"define {lacking}(self, {_WHOLE_STEP[lacking]}) as well, or __call__(self, batch, modules)"
        return f"must have embed and loss together, but has {present[0]} without {lacking}", fix
    if has_call:
        # Helpers of an author's own, as before there was such a pair.
        return None
    for method, arguments in _WHOLE_STEP.items():
        if not takes(getattr(create, method), 3):
            return f"{method} must be a method {method}(self, {arguments})", ""
    if hasattr(create, "count_items"):
        fix = "remove count_items, and return 0 for rows that do not count"
        return "count_items cannot be combined with embed and loss, whose items are the rows", fix
    return None


def _is_list_of_names(value: object) -> bool:
    # A single string is a sequence of strings too, but never meant as one.
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(name, str) for name in value)


def takes(function: Callable[..., object], count: int) -> bool:
    """Return whether a function can be called with so many arguments."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:
        # Functions written in C may have no signature; they get the benefit of the doubt.
        return True
    return True
