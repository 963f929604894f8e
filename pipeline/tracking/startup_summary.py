"""The first and the last lines of a run."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

import pipeline
from pipeline.arguments import set_flags
from pipeline.command_lines import run_line, verb_line
from pipeline.components import Losses
from pipeline.distributed.processes import Processes
from pipeline.experiment.assembly import Experiment
from pipeline.experiment.constant_parameters import constant_names, select, source_name
from pipeline.experiment.initial_weights import describe_source
from pipeline.experiment.settings.settings import TrainingSettings
from pipeline.paths import MODULE_CKPS, ExperimentPaths
from pipeline.progress import Progress
from pipeline.serialization.shard_index import is_sharded
from pipeline.system.disk import Disk
from pipeline.system.formatting import shown_bytes, shown_duration, shown_number, shown_parameters, shown_values
from pipeline.tracking.factory import show_commands
from pipeline.training.step_plan import StepPlan

# Lines that begin with it are meant as warnings.
WARNING_MARK = "WARNING: "
# Commits kept of weights and of two optimizer moments each, and the initial and the best pool.
_NUM_KEPT_COPIES = 3 * 3 + 2


def first_block(
    paths: ExperimentPaths, processes: Processes, experiment: Experiment, found: str, doubt: str = ""
) -> Iterator[str]:
    """Yield what a person wants to know before a run begins; ``doubt`` is why it cannot be bit-exact, if it cannot."""
    yield f"training pipeline {pipeline.__version__}: {' '.join(sys.argv)}"
    threads = torch.get_num_threads()
    reason = f" ({processes.device_reason})" if processes.device_reason else ""
    yield (
        f"processes: {processes.world_size} on {processes.device.type}{reason}, backend {processes.backend}, "
        f"threads in each: {threads}"
    )
    elsewhere = f", results in {paths.top}" if paths.top != paths.home else ""
    yield f"data home: {paths.home}{elsewhere}"
    yield f"state: {found}"
    if experiment.settings.parameters:
        yield f"parameters: {shown_parameters(experiment.settings.parameters)}"
    yield from _part_lines(experiment)
    yield from _disk_lines(paths, experiment)
    training = experiment.settings.training
    if training.uses_deterministic_kernels(processes.device.type) and not training.deterministic:
        yield "deterministic kernels: on, implied by gradient_reduction: exact on a GPU"
    yield f"resume: {_describe_exactness(training, processes, threads, doubt)}"


def _describe_exactness(training: TrainingSettings, processes: Processes, threads: int, doubt: str) -> str:
    """Return how a resumed run compares with an uninterrupted one; only what was checked is claimed."""
    # First, because without deterministic kernels nothing is promised that a doubt could take back.
    if processes.device.type != "cpu" and not training.uses_deterministic_kernels(processes.device.type):
        return "equal up to rounding; set deterministic: true for bit-exact resumes on a GPU"
    if doubt:
        return doubt
    each = shown_number(threads, "thread", "threads")
    if training.is_exact:
        return f"bit-exact with any number of processes × {each}"
    group = shown_number(processes.world_size, "process", "processes")
    return f"bit-exact with {group} × {each}; otherwise equal up to rounding"


def _part_lines(experiment: Experiment) -> Iterator[str]:
    for name, splits in experiment.splits.items():
        sizes = ", ".join(f"{split} {len(indices):,}" for split, indices in splits.items())
        yield f"dataset {name}: {sizes} points, batches of {experiment.components.dataloaders[name].train.batch_size}"
    constant = constant_names(experiment.components, experiment.settings.training)
    for name, module in experiment.components.all_modules.items():
        counts = [(parameter.numel(), parameter.requires_grad) for parameter in module.parameters()]
        trained = sum(count for count, is_trained in counts if is_trained)
        spread = ", sharded" if any(is_sharded(parameter) for parameter in module.parameters()) else ""
        average = experiment.components.averages.get(name)
        kind = f"{trained:,} trained" if average is None else f"an average of {average.source}"
        saved = _describe_saving(experiment, name, constant.get(name, []))
        yield f"module {name}: {sum(count for count, _ in counts):,} parameters, {kind}{spread}{saved}"
    for name, groups in experiment.learning_rates().items():
        rates = ", ".join(f"{group} {rate:.3e}" for group, rate in groups.items())
        yield f"learning rates of {name}: {rates}"


def _describe_saving(experiment: Experiment, name: str, constant: list[str]) -> str:
    """Return what commits hold of parameters that are not trained; nothing for a module without such parameters."""
    if not constant:
        return ""
    modules = experiment.components.modules
    number = sum(tensor.numel() for tensor in select(modules[name].module, constant).values())
    origin = source_name(modules, name)
    if not modules[origin].saves_trained_only:
        return f"; {number:,} others are saved once"
    source = describe_source(origin, modules[origin], experiment.settings.training)
    return f"; {number:,} others are not saved, because every start takes them from {source}"


def _disk_lines(paths: ExperimentPaths, experiment: Experiment) -> Iterator[str]:
    """Yield how much the results will need, estimated from the weights, and a warning if it may not fit."""
    constant = constant_names(experiment.components, experiment.settings.training)
    needed = 0
    for name, module in experiment.components.changing_modules.items():
        once = _count_bytes(select(module, constant.get(name, [])).values())
        needed += _NUM_KEPT_COPIES * (_count_bytes(module.parameters()) - once) + once
    free = Disk().free_bytes(paths.results)
    yield f"disk: about {shown_bytes(needed)} needed, {shown_bytes(free)} free"
    if free < needed:
        yield (
            f"{WARNING_MARK}{paths.results} may fill its disk: about {shown_bytes(needed)} are needed and "
            f"{shown_bytes(free)} are free. A run that cannot commit stops; free some space, or choose another "
            "--data-home."
        )


def _count_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def step_lines(plan: StepPlan, experiment: Experiment, processes: Processes) -> Iterator[str]:
    """Yield how items make up steps, and what would keep every process busy."""
    settings = experiment.settings
    max_batches = plan.max_batches
    if settings.mixture is None:
        items = shown_number(settings.step_min_items, "item", "items")
        content = f"at least {items} in up to {shown_number(max_batches, 'batch', 'batches')}"
    else:
        mixed = ", ".join(f"{weight:g} of {name}" for name, weight in settings.mixture.items())
        content = f"up to {shown_number(max_batches, 'batch', 'batches')}: {mixed} on average"
    end = "" if plan.max_steps is None else f"; {plan.max_steps} in all"
    yield f"steps: {plan.num_steps} per epoch of {content}{end}"
    if settings.limit_batches is not None:
        yield f"limit: the first {settings.limit_batches} batches of each split; this is a try and not the real run"
    counting = [name for name, entry in experiment.components.module_transforms.items() if entry.counts_items]
    if counting:
        yield f"items: counted by {', '.join(counting)}, so each process holds all of its batches of a step in memory"
    coupled = [name for name, entry in experiment.components.module_transforms.items() if entry.is_whole_step]
    if coupled:
        yield f"rows: coupled by {', '.join(coupled)}, so each process holds all of its batches of a step in memory"
    is_endless = settings.steps_per_epoch is not None
    # BatchNorm cannot normalise a batch of a single point.
    modules = experiment.components.trained_modules.values()
    if not is_endless and any(isinstance(layer, _BatchNorm) for module in modules for layer in module.modules()):
        for name, loading in experiment.components.dataloaders.items():
            size = len(experiment.splits[name]["train"])
            if size % loading.train.batch_size == 1:
                yield f"{WARNING_MARK}the last batch of {name} has 1 of {size} points, which BatchNorm may refuse"
    if max_batches < processes.world_size and settings.mixture is None:
        # So many that the largest batches of all processes but one do not make up a step yet.
        batch_items = [loading.train.batch_items for loading in experiment.components.dataloaders.values()]
        enough = max(batch_items) * (processes.world_size - 1) + 1
        batches = shown_number(max_batches, "batch", "batches")
        num_idle = processes.world_size - max_batches
        yield (
            f"{WARNING_MARK}a step has at most {batches}, so {num_idle} of {processes.world_size} processes are idle; "
            f"data_loading.step_min_items of {enough} or more would use all."
        )


def change_lines(changed: Sequence[str], harmless: Sequence[str], doubt: str, progress: Progress) -> Iterator[str]:
    """Yield what changed since the last start, and whether bits depend on it."""
    if harmless:
        yield (
            f"Changed since the last start: {', '.join(harmless)}. This does not change any bits, because "
            "gradient_reduction is exact."
        )
    if changed and doubt:
        yield (
            f"{WARNING_MARK}Changed since the last start: {', '.join(changed)}. Training continues; from "
            f"{progress.describe_next()} on, bits may differ from those of an uninterrupted run, by rounding."
        )
    elif changed:
        # Such as a start with other threads that was killed before it could commit anything.
        yield (
            f"Changed since the last start: {', '.join(changed)}. No bits depend on it, because no work of the last "
            "start is left."
        )


def last_block(
    paths: ExperimentPaths, outcome: str, seconds: float, best: dict[str, Any], report: Path | None
) -> Iterator[str]:
    """Yield what a person wants to know when a run has ended; ``report`` is the page, if it was written."""
    yield f"{outcome} after {shown_duration(seconds)}"
    if best:
        yield f"best: epoch {best['epoch']}, {shown_values(best['values'])}"
        yield f"weights: {paths.data / MODULE_CKPS / 'best'}"
    if report is not None:
        yield f"report: {report}"
    yield f"log: {paths.log_file}"
    for command in show_commands(paths.logs):
        yield f"curves: {command}"


def next_line(paths: ExperimentPaths, progress: Progress, overrides: Sequence[str] = ()) -> str:
    """Return the command that most people want next; a real run is that of a try, with the same ``overrides``."""
    if paths.settings_name:
        line = run_line(paths.settings_name, paths.home, *set_flags(overrides))
        return f"next: {line}    (the real run; nothing of this try is used)"
    if progress.is_finished:
        return f"next: {verb_line('new', 'VARIANT', paths.home, '--from', paths.name)}    (a variant of it)"
    return f"next: {run_line(paths.name, paths.home, '--resume')}    (continues at {progress})"


def latest_values(losses: Losses, split: str) -> dict[str, float | None]:
    """Return each register's latest mean as JSON can hold it."""
    values = {name: record.epoch_means[-1] for name, record in losses[split].items() if record.epoch_means}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
