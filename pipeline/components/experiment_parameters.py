"""Parameters: the values of ``settings/parameters.json``, as pymodules read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from pipeline.errors import nearest

_FILE = "settings/parameters.json"


class Parameters(Mapping[str, Any]):
    """Values by attribute or key; an object in the file is again one of these, and a list is a tuple.

    Nothing of it can be changed: what a run computes with is what the file says. ``**parameters.optimizer`` passes a
    whole object on as keyword arguments.
    """

    __slots__ = ("_path", "_values")
    _values: dict[str, Any]
    _path: str

    def __init__(self, values: Mapping[str, Any], path: str = "parameters") -> None:
        frozen = {name: _freeze(value, f"{path}.{name}") for name, value in values.items()}
        object.__setattr__(self, "_values", frozen)
        object.__setattr__(self, "_path", path)

    def __getattr__(self, name: str) -> Any:
        # Python asks for special names while it copies or unpickles an object that has no values yet.
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(self._describe_missing(name)) from None

    def __getitem__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise _MissingParameter(self._describe_missing(name)) from None

    def _describe_missing(self, name: str) -> str:
        known = ", ".join(self._values) or "nothing"
        hint = nearest(str(name), list(self._values))
        return f"{_FILE} must have {self._path}.{name}, but {self._path} has {known}.{hint}"

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(
            f"{self._path}.{name} must not be changed by code: parameters are frozen with the settings. "
            f"Change {_FILE}, or start with --set {self._path}.{name}=VALUE"
        )

    def __delattr__(self, name: str) -> NoReturn:
        self.__setattr__(name, None)

    def __repr__(self) -> str:
        return f"Parameters({self._values})"

    def __reduce__(self) -> tuple[type[Parameters], tuple[dict[str, Any], str]]:
        return Parameters, (self._values, self._path)


class _MissingParameter(KeyError):
    """A KeyError whose message is shown as it is, without quotes."""

    def __str__(self) -> str:
        return str(self.args[0])


def _freeze(value: object, path: str) -> object:
    if isinstance(value, Mapping):
        return Parameters(value, path)
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(inner, f"{path}[{index}]") for index, inner in enumerate(value))
    return value
