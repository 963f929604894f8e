"""Calling the author's hooks, and refusing what they must leave alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import nn
from torch.optim import Optimizer

from pipeline.checkpoint.records import Records
from pipeline.components import TrainingState
from pipeline.components.hooks import MOMENTS, is_overridden
from pipeline.distributed.processes import Processes
from pipeline.errors import BrokenContract, Problem
from pipeline.experiment.assembly import Experiment
from pipeline.experiment.pymodules.user_code import place_of
from pipeline.serialization.npz_files import is_entry_name
from pipeline.system.seeding import seed_generators
from pipeline.training.engines.base import GradientEngine
from pipeline.training.step_plan import StepPlan

_MAX_SHOWN_NAMES = 5
_Call = Callable[[TrainingState], None]
# What must stay as it is of each parameter and buffer, by module and name.
_Tensors = dict[tuple[str, str], tuple[object, ...]]
# Name and parameters of each group, by optimizer; parameters by identity, because tensors compare their values.
_Groups = dict[str, list[tuple[object, list[int]]]]


@dataclass(frozen=True)
class _Structure:
    """What hooks must leave as it is, and the groups to which they may add others."""

    tensors: _Tensors
    groups: _Groups


class Hooks:
    """Calls the hooks of an experiment at their moments; a moment that no hook defines costs nothing."""

    def __init__(
        self, experiment: Experiment, processes: Processes, engine: GradientEngine, records: Records, plan: StepPlan
    ) -> None:
        self._experiment = experiment
        self._processes = processes
        self._engine = engine
        self._records = records
        self._plan = plan
        self._calls: dict[str, dict[str, _Call]] = {
            moment: {
                name: getattr(hook, moment)
                for name, hook in experiment.components.hooks.items()
                if is_overridden(hook, moment)
            }
            for moment in MOMENTS
        }

    def has(self, moment: str) -> bool:
        """Return whether any hook acts at a moment."""
        return bool(self._calls[moment])

    def call(self, moment: str, epoch: int, step: int = 0) -> None:
        """Call the hooks at a moment between steps; called on all ranks, which end together if a hook is refused."""
        if self.has(moment):
            self._processes.on_all_ranks(self._call, moment, epoch, step)

    def call_after_step(self, epoch: int, step: int) -> None:
        """Call the hooks after a step, without asking the other ranks."""
        if self.has("after_train_step"):
            self._call("after_train_step", epoch, step)

    def _call(self, moment: str, epoch: int, step: int) -> None:
        # A sharded module that was gathered for an evaluation still shows whole weights.
        self._engine.reshard()
        modules = self._experiment.components.trained_modules
        optimizers = self._experiment.optimizers
        state = TrainingState(
            modules=MappingProxyType(modules),
            optimizers=MappingProxyType(optimizers),
            position=self._plan.position_after(epoch)
            if moment == "after_evaluation"
            else self._plan.position(epoch, step),
            losses=self._records.losses,
        )
        for name, call in self._calls[moment].items():
            before = _describe(modules, optimizers)
            # Each hook has its own key, so that adding one does not change what the others draw.
            seed_generators(self._experiment.settings.training.seed, "hook", name, moment, epoch, step)
            with torch.no_grad():
                call(state)
            problem = _find_tensor_change(before.tensors, _describe(modules, optimizers).tensors)
            problem = problem or _find_group_problem(before.groups, modules, optimizers)
            if problem is not None:
                what, fix = problem
                file = Path(self._experiment.folder / "hooks" / f"{name}.py")
                raise BrokenContract(Problem(place_of(file, "hook"), f"{moment} {what}", fix))


def _describe(modules: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]) -> _Structure:
    tensors: _Tensors = {}
    for module_name, module in modules.items():
        for path, layer in module.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            for name, parameter in layer._parameters.items():
                if parameter is not None:
                    # By identity: an optimizer would go on with a parameter that was replaced.
                    tensors[module_name, prefix + name] = (id(parameter), parameter.shape, parameter.dtype)
            for name, buffer in layer._buffers.items():
                if buffer is not None:
                    tensors[module_name, prefix + name] = (buffer.shape, buffer.dtype)
    groups: _Groups = {
        name: [(group.get("name"), list(map(id, group["params"]))) for group in optimizer.param_groups]
        for name, optimizer in optimizers.items()
    }
    return _Structure(tensors, groups)


# What is wrong, and how to repair it.
_Refusal = tuple[str, str]


def _find_tensor_change(before: _Tensors, after: _Tensors) -> _Refusal | None:
    if before == after:
        return None
    module, name = next(key for key in [*before, *after] if before.get(key) != after.get(key))
    was, now = before.get((module, name)), after.get((module, name))
    if was is None:
        change = "was added"
    elif now is None:
        change = "was removed"
    elif was[-2:] == now[-2:]:
        change = "is another object now"
    else:
        change = f"was {_show(was)} and is {_show(now)} now"
    what = (
        "must leave the set, shapes and types of parameters and buffers as they are, "
        f"but {name!r} of module {module!r} {change}"
    )
    return what, f"build all layers in modules/{module}.py, and change values in place, as weight.copy_(…) does"


def _show(described: tuple[object, ...]) -> str:
    shape, dtype = described[-2:]
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')}"  # type: ignore[arg-type]


def _find_group_problem(
    before: _Groups, modules: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]
) -> _Refusal | None:
    """Return what is wrong with the groups that a hook has added, or with the parameters that it has unfrozen."""
    named = {
        parameter: f"{module_name}.{name}"
        for module_name, module in modules.items()
        for name, parameter in module.named_parameters()
    }
    owners: dict[nn.Parameter, str] = {}
    for optimizer_name, optimizer in optimizers.items():
        groups = optimizer.param_groups
        known = before[optimizer_name]
        if [(group.get("name"), list(map(id, group["params"]))) for group in groups[: len(known)]] != known:
            what = f"may add param groups, but has removed or changed others of optimizer {optimizer_name!r}"
            return what, "leave the groups that there are, and add one with add_param_group"
        names = [group.get("name") for group in groups]
        for name in names[len(known) :]:
            if not isinstance(name, str) or not is_entry_name(name) or names.count(name) > 1:
                what = f"must give a param group a 'name' of its own, but the names are {names}"
                return what, f'optimizers["{optimizer_name}"].add_param_group({{"params": …, "name": "unfrozen"}})'
        for parameter in (parameter for group in groups[: len(known)] for parameter in group["params"]):
            owners[parameter] = optimizer_name
        for parameter in (parameter for group in groups[len(known) :] for parameter in group["params"]):
            if parameter not in named:
                what = f"has added a parameter to optimizer {optimizer_name!r} that no trained module has"
                return what, "add parameters of state.modules only: others would not be saved"
            if parameter in owners:
                both = " and ".join(sorted({owners[parameter], optimizer_name}))
                return f"has added {named[parameter]}, which is in {both} then", "a parameter belongs to one optimizer"
            owners[parameter] = optimizer_name
    lost = [name for parameter, name in named.items() if parameter.requires_grad and parameter not in owners]
    if lost:
        more = f" and {len(lost) - _MAX_SHOWN_NAMES} more" if len(lost) > _MAX_SHOWN_NAMES else ""
        shown = ", ".join(lost[:_MAX_SHOWN_NAMES])
        what = f"has unfrozen {shown}{more}, which no optimizer has, so that nothing would train them"
        return what, "add them with add_param_group in the same call, or to create_optimizer, frozen or not"
    return None
