"""Names that must match across files: datasets, registers, and what the policies say about them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from pipeline.components import (
    BaseScheduler,
    RegisterEarlyStopper,
    StaticLossWeighter,
    TorchScheduler,
    WarmupScheduler,
)
from pipeline.errors import InvalidExperiment, Problem, nearest
from pipeline.experiment.pymodules.definitions import Components
from pipeline.experiment.pymodules.user_code import place_of
from pipeline.experiment.settings.json_source import read_document
from pipeline.experiment.settings.settings import Settings
from pipeline.experiment.turns import TurnPlan

# The steps of one period are listed.
_MAX_PERIOD = 10_000
_PER_DATASET = ("data_transforms", "dataloaders", "module_transforms")


def name_problems(components: Components, settings: Settings, folder: Path, failed: set[str]) -> Iterator[Problem]:
    """Yield names that do not match across files; families and settings files that ``failed`` are not judged.

    A file that could not be imported has no names: every name it should have would be reported as missing.
    """
    if "datasets" not in failed:
        yield from _dataset_problems(components, folder, failed)
    if not failed & {"datasets", "data_loading"}:
        yield from _mixture_problems(components, settings, folder)
    if "loss_registers" not in failed:
        yield from _register_problems(components, settings, folder, failed)
        yield from _policy_problems(components, settings, folder)
        if not failed & {"metrics", "module_transforms"}:
            yield from _metric_problems(components, settings, folder)
        if "optim_sched" not in failed:
            yield from _turn_problems(components, settings, folder)
    if not failed & {"module_transforms", "loss_registers", "training"}:
        yield from _whole_step_problems(components, settings, folder)
    if "modules" not in failed:
        yield from _average_problems(components, settings, folder)
    # Without any module, the loader has reported the empty folder.
    if components.modules and not components.trained_modules:
        frozen = ", ".join(components.frozen_modules)
        what = f"at least one module must be trained, but all are frozen: {frozen}"
        yield Problem(str(folder / "modules"), what, 'settings = {"frozen": False} in one of them')


def _dataset_problems(components: Components, folder: Path, failed: set[str]) -> Iterator[Problem]:
    """Yield datasets that lack a file, files that belong to no dataset, and counters that do not fit their datasets."""
    datasets = list(components.datasets)
    for family in sorted(set(_PER_DATASET) - failed):
        present = getattr(components, family)
        for dataset in sorted(set(datasets) - set(present)):
            what = f"the file is missing for dataset {dataset!r}, which {folder / 'datasets' / dataset}.py defines"
            yield Problem(str(folder / family / f"{dataset}.py"), what)
        for name in sorted(set(present) - set(datasets)):
            where = str(folder / family / f"{name}.py")
            yield Problem(where, f"must be named like a dataset, {_list_known(name, datasets)}")
    for name, counter in components.data_counters.items():
        for dataset in sorted(set(counter.dataset_names) - set(datasets)):
            where = place_of(folder / "data_counters" / f"{name}.py", "dataset_names")
            yield Problem(where, f"dataset_names has {dataset!r}, {_list_known(dataset, datasets)}")
        for dataset in sorted(set(counter.dataset_names) & set(datasets)):
            # A dataset need not inherit from BaseDataset, which has the method.
            if not callable(getattr(components.datasets[dataset], "getitem_metadata", None)):
                what = f"dataset must have a method getitem_metadata, because data counter {name!r} uses it"
                yield Problem(str(folder / "datasets" / f"{dataset}.py"), what)


def _mixture_problems(components: Components, settings: Settings, folder: Path) -> Iterator[Problem]:
    """Yield datasets that the mixture does not know, or that do not know it, and weights that leave steps empty."""
    if settings.mixture is None:
        return
    settings_file = folder.parent / "settings" / "data_loading.json"
    where = f"{settings_file} (mixture)"
    datasets = sorted(components.datasets)
    for name in sorted(set(settings.mixture) - set(datasets)):
        yield Problem(where, f"has {name!r}, {_list_known(name, datasets)}")
    for name in sorted(set(datasets) - set(settings.mixture)):
        what = f"must have a weight for every dataset, but has none for {name!r}"
        yield Problem(where, what, "add one, or move the dataset out of pymodules/datasets")
    if max(settings.mixture.values()) < 1:
        what = "leaves steps without a batch: at least one weight must be 1 or more, but the highest is"
        yield Problem(where, f"{what} {max(settings.mixture.values()):g}", "multiply all weights by the same number")


def _register_problems(components: Components, settings: Settings, folder: Path, failed: set[str]) -> Iterator[Problem]:
    """Yield registers of the settings and of the module transforms that do not match."""
    known = list(settings.register_names)
    settings_file = folder.parent / "settings" / "loss_registers.json"
    for name, count in Counter(known).items():
        if count > 1:
            what = f"register {name!r} must be listed once, but is listed {count} times"
            yield Problem(_place_of_register(settings_file, name), what)
    if not any(register.optimize for register in settings.loss_registers):
        yield Problem(str(settings_file), "at least one register must be optimised, but all have optimize: false")
    for dataset, definition in components.module_transforms.items():
        where = place_of(folder / "module_transforms" / f"{dataset}.py", "loss_registers")
        for register in sorted(set(definition.loss_registers) - set(known)):
            fix = f'add {register!r} to {settings_file}; with "optimize": false it is only recorded'
            yield Problem(where, f"loss_registers has {register!r}, {_list_known(register, known)}", fix)
    # A transform that could not be imported may be the one that feeds a register.
    if "module_transforms" in failed:
        return
    fed = {name for definition in components.module_transforms.values() for name in definition.loss_registers}
    for register in sorted(set(known) - fed):
        what = f"register {register!r} is fed by no module transform; "
        listed = f"loss_registers of {folder / 'module_transforms'} name {', '.join(sorted(fed)) or 'none'}."
        where = _place_of_register(settings_file, register)
        yield Problem(where, what + listed + nearest(register, sorted(fed)))


def _metric_problems(components: Components, settings: Settings, folder: Path) -> Iterator[Problem]:
    """Yield metrics that nothing feeds, names of metrics that do not exist, and names that are used twice."""
    files = sorted(components.metrics)
    fed = set[str]()
    for dataset, transform in components.module_transforms.items():
        where = place_of(folder / "module_transforms" / f"{dataset}.py", "metrics")
        fed |= set(transform.metrics)
        for name in sorted(set(transform.metrics) - set(files)):
            yield Problem(where, f"metrics has {name!r}, {_list_known(name, files)}")
        for name in sorted(set(transform.metrics) & set(transform.loss_registers)):
            yield Problem(where, f"metrics has {name!r}, which loss_registers has as well", "rename one of them")
    owners: dict[str, str] = {}
    for name, definition in components.metrics.items():
        where = place_of(folder / "metrics" / f"{name}.py", "names")
        if name not in fed:
            what = "must be named in metrics of a module transform, but is in none"
            yield Problem(where, what, f'add metrics = ["{name}"] to a file of module_transforms')
        for register in definition.names:
            if register in owners:
                yield Problem(where, f"names has {register!r}, which {owners[register]} has as well")
            if register in settings.register_names:
                yield Problem(where, f"names has {register!r}, which is a register already", "rename one of them")
            owners[register] = f"metrics/{name}.py"
    for listed in settings.loss_registers:
        average, _, _ = listed.name.rpartition("/")
        if average:
            if average not in components.averages:
                where = _place_of_register(folder.parent / "settings" / "loss_registers.json", listed.name)
                known = sorted(components.averages)
                yield Problem(
                    where, f"register {listed.name!r} is of the average {average!r}, {_list_known(average, known)}"
                )
        elif listed.is_metric and listed.name not in owners:
            where = _place_of_register(folder.parent / "settings" / "loss_registers.json", listed.name)
            yield Problem(where, f"register {listed.name!r} is per split, {_list_known(listed.name, sorted(owners))}")


def _turn_problems(components: Components, settings: Settings, folder: Path) -> Iterator[Problem]:
    """Yield turns and registers of optimizers that do not match, and what would never be trained."""
    training = settings.training
    optimizers = list(components.optim_sched)
    where = f"{folder.parent / 'settings' / 'training.json'} (turns)"
    named = {name for names in training.turns or (tuple(optimizers),) for name in names}
    for name in sorted(named - set(optimizers)):
        yield Problem(where, f"has {name!r}, {_list_known(name, optimizers)}")
    for name in sorted(set(optimizers) - named):
        yield Problem(where, f"must name every optimizer, but {name!r} has no turn", f'add ["{name}"]')
    if training.share_batches and not training.turns:
        yield Problem(f"{where[:-7]}(share_batches)", "needs turns, which share the batches", "set turns, or remove it")
    optimised = [register.name for register in settings.loss_registers if register.optimize]
    followed = set[str]()
    changes_cadence = [name for name, entry in components.optim_sched.items() if entry.every_steps > 1]
    for name, entry in components.optim_sched.items():
        file = folder / "optim_sched" / f"{name}.py"
        followed |= set(optimised if entry.loss_registers is None else entry.loss_registers)
        for register in sorted(set(entry.loss_registers or ()) - set(optimised)):
            what = f"loss_registers has {register!r}, which is not optimised"
            yield Problem(place_of(file, "loss_registers"), f"{what}, {_list_known(register, optimised)}")
        if entry.loss_registers == ():
            yield Problem(place_of(file, "loss_registers"), "loss_registers must name a register, but is empty")
        if entry.loss_registers is not None:
            changes_cadence.append(name)
    for register in sorted(set(optimised) - followed):
        what = f"register {register!r} is optimised, but no optimizer follows it"
        fix = 'add it to loss_registers in a file of optim_sched, or give it "optimize": false'
        yield Problem(_place_of_register(folder.parent / "settings" / "loss_registers.json", register), what, fix)
    period = math.lcm(
        len(training.turns) if training.turns else 1, *(entry.every_steps for entry in components.optim_sched.values())
    )
    if period > _MAX_PERIOD:
        what = f"every_steps and turns must repeat within {_MAX_PERIOD} steps, but do after {period}"
        yield Problem(str(folder / "optim_sched"), what, "choose numbers that are multiples of each other")
    elif named == set(optimizers):
        turns = TurnPlan(components.optim_sched, settings)
        for name in optimizers:
            if not turns.updates_before(name, turns.period):
                what = f"{name!r} would never act: its turns do not come in the steps that every_steps leaves it"
                yield Problem(
                    str(folder / "optim_sched" / f"{name}.py"), what, "remove every_steps, or change the turns"
                )
    if training.shards_modules and (training.turns or changes_cadence):
        names = "turns" if training.turns else f"loss_registers and every_steps of {', '.join(changes_cadence)}"
        what = f'"{training.parallelism}" does not go together with {names}: torch reduces the gradients of all shards'
        yield Problem(f"{where[:-7]}(parallelism)", what, 'set parallelism to "ddp"')


def _whole_step_problems(components: Components, settings: Settings, folder: Path) -> Iterator[Problem]:
    """Yield settings that losses over whole steps do not go with."""
    per_batch = {register.name for register in settings.loss_registers if register.per == "batch"}
    training = settings.training
    for dataset, definition in components.module_transforms.items():
        if not definition.is_whole_step:
            continue
        where = place_of(folder / "module_transforms" / f"{dataset}.py", "embed")
        for name in sorted(per_batch & set(definition.loss_registers)):
            what = f'register {name!r} is per "batch", but loss, which embed comes with, returns one value per row'
            yield Problem(where, what, f'set "per" of {name!r} to "item" in settings/loss_registers.json')
        if training.shards_modules:
            what = f"embed and loss need whole modules on every process, but parallelism is {training.parallelism}"
            yield Problem(where, what, 'set parallelism to "ddp" in settings/training.json')
        optimizers = components.optim_sched.values()
        if training.turns or any(entry.loss_registers or entry.every_steps > 1 for entry in optimizers):
            what = "embed and loss give all optimizers one gradient, but there are turns, loss_registers or every_steps"
            yield Problem(where, what, "let all optimizers follow all registers in every step")
        if training.sync_batchnorm:
            what = "embed runs batches alone, without gradient and then with it, but sync_batchnorm needs all processes"
            yield Problem(where, what, "set sync_batchnorm to false in settings/training.json")


def _average_problems(components: Components, settings: Settings, folder: Path) -> Iterator[Problem]:
    """Yield averages whose BatchNorm statistics would never be computed."""
    for name, average in components.averages.items():
        if average.update_bn and settings.training.evaluation_interval == 0:
            where = place_of(folder / "modules" / f"{name}.py", "settings")
            what = "update_bn needs evaluations, in which it is done, but evaluation_interval is 0"
            yield Problem(where, what, "set update_bn to 0, or evaluation_interval to 1")


def _place_of_register(settings_file: Path, register: str) -> str:
    """Return ``file:line`` where a register is listed, or the file alone if ``--set`` has added it."""
    try:
        document = read_document(settings_file)
    except InvalidExperiment:
        return str(settings_file)
    for index, entry in enumerate(document.value.get("loss_registers", [])):
        if register == (entry if isinstance(entry, str) else entry["name"]):
            return document.place(("loss_registers", index, "name"))
    return str(settings_file)


def _policy_problems(components: Components, settings: Settings, folder: Path) -> Iterator[Problem]:
    """Yield registers that the ready policies name but do not exist, and a stopper that would never stop."""
    known = [register.name for register in settings.loss_registers]
    stopper = components.early_stopper
    if isinstance(stopper, RegisterEarlyStopper) and stopper.register not in known:
        what = f"register {stopper.register!r}, {_list_known(stopper.register, known)}"
        yield Problem(str(folder / "early_stopper.py"), what)
    weighter = components.loss_weighter
    if isinstance(weighter, StaticLossWeighter):
        for name in sorted(set(weighter.weights) - set(known)):
            yield Problem(str(folder / "loss_weighter.py"), f"weights has {name!r}, {_list_known(name, known)}")
    # A stopper without the attributes is the author's own and may stop by other rules.
    limits = [getattr(stopper, name) for name in ("max_epochs", "max_steps") if hasattr(stopper, name)]
    if not limits or any(
        limit is not None for limit in (*limits, settings.training.max_epochs, settings.training.max_steps)
    ):
        return
    if getattr(stopper, "patience", 1) is None:
        what = "must have max_epochs, max_steps or patience, but has none of them: training would never end"
    elif settings.training.evaluation_interval == 0:
        what = "needs max_epochs, because evaluation_interval is 0 and patience alone would never end the training"
    else:
        return
    yield Problem(str(folder / "early_stopper.py"), what, "set max_epochs or max_steps in settings/training.json")


def scheduler_problems(schedulers: Mapping[str, BaseScheduler], settings: Settings, folder: Path) -> Iterator[Problem]:
    """Yield schedulers that follow a register of evaluations which does not exist, or is better the other way."""
    # Metrics and averages of weights have registers, too.
    directions = {register.name: register.direction for register in settings.loss_registers if "val" in register.splits}
    for name, scheduler in schedulers.items():
        while isinstance(scheduler, WarmupScheduler):
            scheduler = scheduler.then
        if not isinstance(scheduler, TorchScheduler) or scheduler.register is None:
            continue
        where = place_of(folder / "optim_sched" / f"{name}.py", "create_scheduler")
        register = scheduler.register
        mode = scheduler.torch_scheduler.mode  # type: ignore[attr-defined]
        if register not in directions:
            what = f"ReduceLROnPlateau follows register {register!r}, {_list_known(register, list(directions))}"
            yield Problem(where, what)
        elif mode != directions[register]:
            what = (
                f"ReduceLROnPlateau has mode {mode!r}, but register {register!r} has direction {directions[register]!r}"
            )
            yield Problem(where, what, f'write mode="{directions[register]}"')
        if settings.training.evaluation_interval == 0:
            what = "ReduceLROnPlateau follows evaluations, but evaluation_interval is 0, so it would never act"
            yield Problem(where, what, "set evaluation_interval to 1, or use a scheduler that follows epochs or steps")


def _list_known(name: str, known: list[str]) -> str:
    return f"but there are {', '.join(sorted(known)) or 'none'}.{nearest(name, known)}"
