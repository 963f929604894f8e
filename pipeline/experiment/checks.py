"""Cross-checks: what the files of an experiment say must fit together."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from pipeline.components import RegisterEarlyStopper, StaticLossWeighter
from pipeline.errors import Problem, nearest
from pipeline.experiment.pymodules.contracts import place_of
from pipeline.experiment.pymodules.definitions import Components, ModuleDefinition
from pipeline.experiment.pymodules.user_code import user_problem
from pipeline.experiment.settings.settings import FSDP, Settings
from pipeline.serialization.npz_files import is_entry_name

Splits = dict[str, dict[str, np.ndarray]]
_SHOWN = 10
_PER_DATASET = ("data_transforms", "dataloaders", "module_transforms")


def name_problems(components: Components, settings: Settings, folder: Path, failed: set[str]) -> Iterator[Problem]:
    """Yield names that do not match across files; families and settings files that ``failed`` are not judged."""
    yield from _dataset_file_problems(components, folder, failed)
    if "loss_registers" not in failed:
        yield from _register_problems(components, settings, folder, failed)
    for name, counter in components.data_counters.items() if "datasets" not in failed else ():
        for dataset in sorted(set(counter.dataset_names) - set(components.datasets)):
            where = place_of(folder / "data_counters" / f"{name}.py", "dataset_names")
            yield Problem(where, f"dataset_names has {dataset!r}, {_available(dataset, list(components.datasets))}")
        for dataset in sorted(set(counter.dataset_names) & set(components.datasets)):
            if not callable(getattr(components.datasets[dataset], "getitem_metadata", None)):
                where = str(folder / "datasets" / f"{dataset}.py")
                yield Problem(
                    where, f"dataset must have a method getitem_metadata, because data counter {name!r} uses it"
                )
    if "loss_registers" not in failed:
        yield from _policy_problems(components, settings, folder)
    if components.modules and not components.trained_modules:
        frozen = ", ".join(components.frozen_modules)
        what = f"at least one module must be trained, but all are frozen: {frozen}"
        yield Problem(str(folder / "modules"), what, 'settings = {"frozen": False} in one of them')


def _policy_problems(components: Components, settings: Settings, folder: Path) -> Iterator[Problem]:
    """Yield what the ready policies say about registers that do not exist, or an end that never comes."""
    known = list(settings.register_names)
    stopper = components.early_stopper
    weighter = components.loss_weighter
    if isinstance(stopper, RegisterEarlyStopper) and stopper.register not in known:
        yield Problem(
            str(folder / "early_stopper.py"), f"register {stopper.register!r}, {_available(stopper.register, known)}"
        )
    for name in sorted(set(weighter.weights) - set(known)) if isinstance(weighter, StaticLossWeighter) else []:
        yield Problem(str(folder / "loss_weighter.py"), f"weights has {name!r}, {_available(name, known)}")
    if settings.training.evaluation_interval == 0 and getattr(stopper, "max_epochs", 1) is None:
        what = "needs max_epochs, because evaluation_interval is 0 and patience alone would never end the training"
        yield Problem(str(folder / "early_stopper.py"), what)


def _dataset_file_problems(components: Components, folder: Path, failed: set[str]) -> Iterator[Problem]:
    datasets = list(components.datasets)
    for family in () if "datasets" in failed else sorted(set(_PER_DATASET) - failed):
        present = getattr(components, family)
        for dataset in sorted(set(datasets) - set(present)):
            what = f"the file is missing for dataset {dataset!r}, which {folder / 'datasets' / dataset}.py defines"
            yield Problem(str(folder / family / f"{dataset}.py"), what)
        for name in sorted(set(present) - set(datasets)):
            where = str(folder / family / f"{name}.py")
            yield Problem(where, f"must be named like a dataset, {_available(name, datasets)}")


def _register_problems(components: Components, settings: Settings, folder: Path, failed: set[str]) -> Iterator[Problem]:
    known = list(settings.register_names)
    settings_file = str(folder.parent / "settings" / "loss_registers.json")
    for name, count in Counter(known).items():
        if count > 1:
            where = _line_of(settings_file, name)
            yield Problem(where, f"register {name!r} must be listed once, but is listed {count} times")
    if not any(register.optimize for register in settings.loss_registers):
        yield Problem(settings_file, "at least one register must be optimised, but all have optimize: false")
    for dataset, definition in components.module_transforms.items():
        where = place_of(folder / "module_transforms" / f"{dataset}.py", "loss_registers")
        for register in sorted(set(definition.loss_registers) - set(known)):
            yield Problem(where, f"loss_registers has {register!r}, {_available(register, known)} ({settings_file})")
    fed = {name for definition in components.module_transforms.values() for name in definition.loss_registers}
    for register in sorted(set(known) - fed) if "module_transforms" not in failed else ():
        what = f"register {register!r} is fed by no module transform; "
        listed = f"loss_registers of {folder / 'module_transforms'} name {', '.join(sorted(fed)) or 'none'}."
        yield Problem(_line_of(settings_file, register), what + listed + nearest(register, sorted(fed)))


def _line_of(file: str, name: str) -> str:
    """Return ``file:line`` of a name in a settings file, or the file alone."""
    path = Path(file)
    lines = path.read_text(encoding="utf-8-sig").splitlines() if path.is_file() else []
    return next((f"{file}:{number}" for number, line in enumerate(lines, 1) if json.dumps(name) in line), file)


def _available(name: str, known: list[str]) -> str:
    return f"but there are {', '.join(sorted(known)) or 'none'}.{nearest(name, known)}"


def read_splits(
    components: Components, folder: Path, wanted: Sequence[str] = ("train", "val")
) -> tuple[Splits, list[Problem]]:
    """Return the indices of every dataset's wanted splits."""
    splits: Splits = {}
    problems: list[Problem] = []
    for name, dataset in components.datasets.items():
        where = str(folder / "datasets" / f"{name}.py")
        try:
            splits[name] = {split: _indices(dataset, split) for split in wanted}
        except (Exception, SystemExit) as error:
            must = "get_split_idxs must return the indices of a split"
            problems.append(user_problem(error, folder, where, must))
            continue
        if "train" in wanted and not len(splits[name]["train"]):
            problems.append(Problem(where, "the train split must have points, but get_split_idxs('train') has 0"))
    return splits, problems


def _indices(dataset: Any, split: str) -> np.ndarray:
    indices = np.asarray(dataset.get_split_idxs(split))
    if indices.ndim != 1 or (indices.size and not np.issubdtype(indices.dtype, np.integer)):
        raise TypeError(f"{split!r} must be a list of integers, but has shape {indices.shape} of {indices.dtype}")
    if len(np.unique(indices)) < len(indices):
        raise ValueError(f"{split!r} must name each point once, but has {len(indices) - len(np.unique(indices))} twice")
    return indices.astype(np.int64)


def unevaluated_registers(
    components: Components, settings: Settings, splits: Splits, folder: Path
) -> Iterator[Problem]:
    """Yield registers that no validation point would ever reach."""
    if settings.training.evaluation_interval == 0:
        return
    for register in settings.register_names:
        feeding = [name for name, made in components.module_transforms.items() if register in made.loss_registers]
        if feeding and not any(len(splits[name]["val"]) for name in feeding):
            what = f"register {register!r} is fed by {', '.join(feeding)}, whose val splits have 0 points"
            yield Problem(
                str(folder / "datasets"), what, "give one a val split, or set training.evaluation_interval to 0"
            )


def sync_batchnorm_problems(device: torch.device) -> Iterator[Problem]:
    """torch synchronises BatchNorm on accelerators only."""
    if device.type == "cpu":
        where = "settings/training.json (sync_batchnorm)"
        yield Problem(where, "needs an accelerator, but this run is on the CPU", "set it to false")


def sparse_problems(components: Components, settings: Settings, folder: Path, world_size: int) -> Iterator[Problem]:
    """Yield embeddings whose sparse gradients cannot be added over ranks."""
    training = settings.training
    reasons = [
        (f"parallelism: {training.parallelism}", training.parallelism == FSDP),
        (f"gradient_reduction: {training.gradient_reduction}", training.is_exact),
        (f"{world_size} processes", world_size > 1),
    ]
    reason = next((words for words, holds in reasons if holds), None)
    for name, module in components.trained_modules.items() if reason else ():
        for path, layer in module.named_modules():
            if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse:
                what = f"{path or 'module'} must have dense gradients with {reason}, but has sparse=True"
                fix = "create it with sparse=False, or train with gradient_reduction: fast and one process"
                yield Problem(str(folder / "modules" / f"{name}.py"), what, fix)


def optimizer_problems(optimizers: Mapping[str, Optimizer], folder: Path) -> Iterator[Problem]:
    """Yield optimizers that evaluate the loss themselves, several times per update."""
    for name, optimizer in optimizers.items():
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            yield Problem(
                str(folder / "optim_sched" / f"{name}.py"),
                f"an optimizer must take one step per gradient, but {type(optimizer).__name__}.step needs a closure",
                "use an optimizer whose step() can be called without arguments, such as AdamW or SGD",
            )


def parameter_problems(components: Components, optimizers: Mapping[str, Optimizer], folder: Path) -> Iterator[Problem]:
    """Yield parameters in no or two optimizers, and groups without a name."""
    owners: dict[int, list[str]] = {}
    for name, optimizer in optimizers.items():
        where = str(folder / "optim_sched" / f"{name}.py")
        names = [group.get("name") for group in optimizer.param_groups]
        if any(not isinstance(group, str) for group in names) or len(set(names)) < len(names):
            yield Problem(where, f"every param group must have a 'name' of its own, but the names are {names}")
        # Records name a column after each group, and a file with an odd one would not be read back.
        for odd in [group for group in names if isinstance(group, str) and not is_entry_name(group)]:
            yield Problem(where, f"the name of a param group must be plain text without '..', but is {odd!r}")
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                owners.setdefault(id(parameter), []).append(name)
    known = {id(parameter) for entry in components.modules.values() for parameter in entry.module.parameters()}
    for name in sorted({name for parameter, names in owners.items() if parameter not in known for name in names}):
        what = "every parameter must belong to a module in modules/, but some do not: they would not be saved"
        yield Problem(str(folder / "optim_sched" / f"{name}.py"), what)
    for module_name, entry in components.modules.items():
        yield from _owner_problems(entry, owners, str(folder / "modules" / f"{module_name}.py"))


def _owner_problems(entry: ModuleDefinition, owners: Mapping[int, list[str]], where: str) -> Iterator[Problem]:
    """Yield one problem for all parameters of a module that are in the same wrong optimizers."""
    misplaced: dict[str, list[str]] = {}
    for name, parameter in entry.module.named_parameters():
        found = owners.get(id(parameter), [])
        if found if entry.frozen else parameter.requires_grad and len(found) != 1:
            misplaced.setdefault(" and ".join(found) or "none", []).append(repr(name))
    for found_in, names in misplaced.items():
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        must = "frozen parameters must be in no" if entry.frozen else "every parameter must be in exactly one"
        what = f"{must} optimizer, but {', '.join(names[:_SHOWN])}{more} are in {found_in}"
        fix = "leave them out of create_optimizer" if entry.frozen else "see create_optimizer in optim_sched/*.py"
        yield Problem(where, what, fix)
