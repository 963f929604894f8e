"""Parameters that need no gradient when an experiment is prepared, such as a backbone below adapters.

Commits hold them in a file that is written once. With ``save: "trained"`` they hold a record instead: every start
rebuilds the parameters from where they came from and compares them with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeline.errors import PipelineError, Problem
from pipeline.experiment.pymodules.definitions import Components, ModuleDefinition
from pipeline.experiment.pymodules.user_code import place_of
from pipeline.experiment.settings.settings import TrainingSettings
from pipeline.serialization.fingerprint import fingerprint

_MAX_SHOWN = 3
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Record:
    """What stands for constant parameters that are not saved: where they come from, and a digest of each."""

    source: str
    digests: Mapping[str, str]

    @classmethod
    def of(cls, source: str, tensors: Tensors) -> Record:
        return cls(source, {name: fingerprint(tensor) for name, tensor in tensors.items()})

    def as_json(self) -> dict[str, Any]:
        return {"source": self.source, "digests": dict(self.digests)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Record:
        return cls(value["source"], value["digests"])


def constant_names(components: Components, training: TrainingSettings) -> dict[str, list[str]]:
    """Return the names of constant parameters by module, for the modules that have any.

    A frozen module is written once as a whole, unless its file asks to leave the parameters out. An average has those
    of its source: it never changes them. Shards are always written whole.
    """
    if training.shards_modules:
        return {}
    named: dict[str, list[str]] = {}
    for name, definition in components.modules.items():
        source = components.modules[source_name(components.modules, name)]
        if not definition.frozen or definition.saves_trained_only:
            named[name] = _names_without_gradient(source.module)
    return {name: names for name, names in named.items() if names}


def source_name(modules: Mapping[str, ModuleDefinition], name: str) -> str:
    """Return the module that an average begins as, or the module itself if it is none."""
    average = modules[name].average
    return name if average is None else average.source


def _names_without_gradient(module: nn.Module) -> list[str]:
    state = module.state_dict()
    return [
        name
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad and _holds(state.get(name), parameter)
    ]


def _holds(value: object, parameter: nn.Parameter) -> bool:
    """Return whether an entry of a state dict is a parameter itself, as plain numbers."""
    # Quantised and sparse tensors have no bit patterns that checksums could read. An author's state_dict may compute
    # what it returns.
    if not isinstance(value, torch.Tensor) or type(value) is not torch.Tensor:
        return False
    return value.layout is torch.strided and not value.is_quantized and value.data_ptr() == parameter.data_ptr()


def select(module: nn.Module, names: Iterable[str]) -> Tensors:
    """Return tensors of a module's state by name; one that it does not have any more is left out."""
    state = module.state_dict()
    return {name: state[name] for name in names if isinstance(state.get(name), torch.Tensor)}


def saving_problems(components: Components, training: TrainingSettings, folder: Path) -> Iterator[Problem]:
    """Yield modules that ask to leave out of commits what they do not have, or what shards always hold."""
    constant = constant_names(components, training)
    for name, definition in components.modules.items():
        if not definition.saves_trained_only:
            continue
        where = place_of(folder / "modules" / f"{name}.py", "settings")
        if training.shards_modules:
            what = 'save: "trained" must not be used with parallelism: fsdp, whose shards always hold whole modules'
            yield Problem(where, what, 'remove "save" from settings, or use parallelism: ddp')
        elif name not in constant:
            what = (
                f'save: "trained" leaves parameters that need no gradient out of commits, but {name} has none of them'
            )
            fix = 'call requires_grad_(False) on what is not trained where the module is made, or remove "save"'
            yield Problem(where, what, fix)


def check_rebuilt(name: str, module: nn.Module, record: Record, folder: Path) -> Tensors:
    """Return the constant parameters of a module that was rebuilt, or refuse ones that are not what they were."""
    rebuilt = select(module, record.digests)
    differing = [key for key, digest in record.digests.items() if fingerprint(rebuilt.get(key)) != digest]
    if not differing:
        return rebuilt
    more = f" and {len(differing) - _MAX_SHOWN} more" if len(differing) > _MAX_SHOWN else ""
    raise PipelineError(
        f'{folder / "modules" / f"{name}.py"}: with save: "trained", parameters that are not trained come from '
        f"{record.source} and must be what they were when the experiment began, but "
        f"{', '.join(differing[:_MAX_SHOWN])}{more} differ.\n"
        f"  fix: restore {record.source} as it was. Weights that a file draws by itself also depend on the version of "
        "torch and the number of threads."
    )
