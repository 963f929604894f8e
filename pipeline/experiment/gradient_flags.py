"""Which parameters are trained: their requires_grad flags, which an author's code may change during training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

Flags = tuple[bool, ...]
# The parameters that are not trained, by module: what a commit holds of the flags.
FrozenNames = dict[str, list[str]]


class GradientFlags:
    """Reads and sets the flags of all parameters of some modules, each parameter once."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        named: dict[nn.Parameter, tuple[str, str]] = {}
        for module_name, module in modules.items():
            for name, parameter in module.named_parameters():
                # A weight that two modules share has one flag and goes by its first name.
                named.setdefault(parameter, (module_name, name))
        self.parameters: Sequence[nn.Parameter] = tuple(named)
        self._names: Sequence[tuple[str, str]] = tuple(named.values())

    def now(self) -> Flags:
        return tuple([parameter.requires_grad for parameter in self.parameters])

    def set(self, flags: Flags) -> None:
        """Set all flags; a parameter that has its flag already is not touched."""
        for parameter, is_trained in zip(self.parameters, flags, strict=True):
            if parameter.requires_grad != is_trained:
                parameter.requires_grad_(is_trained)

    def select_trained(self, flags: Flags) -> list[nn.Parameter]:
        return [parameter for parameter, is_trained in zip(self.parameters, flags, strict=True) if is_trained]

    def describe(self, flags: Flags) -> dict[str, bool]:
        """Return flags by the words in which a difference between ranks is reported."""
        return {
            f"requires_grad of {name!r} in module {module!r}": is_trained
            for (module, name), is_trained in zip(self._names, flags, strict=True)
        }

    def names(self, parameters: Iterable[nn.Parameter]) -> list[str]:
        """Return the names of parameters, each with the name of its module."""
        wanted = set(parameters)
        named = zip(self.parameters, self._names, strict=True)
        return [f"{module}.{name}" for parameter, (module, name) in named if parameter in wanted]

    def as_json(self, flags: Flags) -> FrozenNames:
        """Return flags as a commit holds them, by name."""
        frozen: FrozenNames = {}
        for (module, name), is_trained in zip(self._names, flags, strict=True):
            if not is_trained:
                frozen.setdefault(module, []).append(name)
        return frozen

    def from_json(self, frozen: Mapping[str, Sequence[str]]) -> Flags:
        """Return the flags of a commit; a parameter that it does not name is trained."""
        known = {module: set(names) for module, names in frozen.items()}
        return tuple(name not in known.get(module, ()) for module, name in self._names)
