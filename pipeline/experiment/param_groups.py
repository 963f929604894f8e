"""The param groups that hooks have added, by name: what a commit says of them, and how they are built again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypedDict

from torch import nn
from torch.optim import Optimizer

from pipeline.errors import DamagedResults


class NamedGroup(TypedDict):
    """A param group and its parameters, each as ``module.parameter``."""

    name: str
    parameters: list[str]


# By optimizer, in the order of its groups. Lists, because a commit does not keep the order of an object's keys.
NamedGroups = dict[str, list[NamedGroup]]


class ParamGroups:
    """Describes the groups of optimizers, and adds those that a commit has and ``create_optimizer`` has not made."""

    def __init__(self, modules: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]) -> None:
        self._optimizers = optimizers
        # Those of create_optimizer, which every start has. A commit need not list their parameters, often thousands.
        self._created = {name: len(optimizer.param_groups) for name, optimizer in optimizers.items()}
        self._names: dict[nn.Parameter, str] = {}
        for module_name, module in modules.items():
            for name, parameter in module.named_parameters():
                # A weight that two modules share goes by its first name.
                self._names.setdefault(parameter, f"{module_name}.{name}")

    def as_json(self) -> NamedGroups:
        """Return the added groups for a commit."""
        return {
            name: [
                {"name": group["name"], "parameters": [self._names[parameter] for parameter in group["params"]]}
                for group in optimizer.param_groups[self._created[name] :]
            ]
            for name, optimizer in self._optimizers.items()
            if len(optimizer.param_groups) > self._created[name]
        }

    def rebuild(self, committed: Mapping[str, Iterable[NamedGroup]]) -> None:
        """Add the groups that are missing; what else a group holds comes with the optimizer's state."""
        parameters = {name: parameter for parameter, name in self._names.items()}
        for optimizer_name, groups in committed.items():
            optimizer = self._optimizers.get(optimizer_name)
            if optimizer is None:
                continue
            present = {group["name"] for group in optimizer.param_groups}
            for group in groups:
                if group["name"] in present:
                    continue
                lost = [name for name in group["parameters"] if name not in parameters]
                if lost:
                    raise DamagedResults(
                        f"Param group {group['name']!r} of optimizer {optimizer_name!r}, which a hook has added, holds "
                        f"{', '.join(lost)}, but there is no such parameter any more.\n"
                        "  fix: undo what was edited in modules/*.py of the frozen copy, or start again with --reset."
                    )
                # The options of another group stand in for those that an optimizer requires; loading replaces them.
                options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
                added = [parameters[name] for name in group["parameters"]]
                optimizer.add_param_group({**options, "params": added, "name": group["name"]})
