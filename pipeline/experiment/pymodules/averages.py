"""Modules that average others: their settings, and the copies of their sources that they begin as."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from pipeline.errors import nearest
from pipeline.experiment.pymodules.definitions import AverageSettings, ModuleDefinition

_OF = "average_of"
AVERAGE_SETTINGS = (_OF, *(field.name for field in fields(AverageSettings) if field.name != "source"))
# The least that these may be.
_MINIMA = {"start_epoch": 1, "every_steps": 1, "update_bn": 0}
_EVALUATIONS = ("instead", "beside", None)
# Reports a name of a file and what is wrong with it.
Report = Callable[[str, str], None]


def read_average(given: Any, has_module: bool, report: Report) -> AverageSettings | None:
    """Return how a module averages another one, if its settings say so; report what is wrong with them."""
    if not isinstance(given, Mapping):
        return None
    if _OF not in given:
        for key in sorted(set(given) & set(AVERAGE_SETTINGS)):
            report(f"settings[{key!r}]", f"is for averages: it needs {_OF}")
        return None
    for key in sorted(set(given) - set(AVERAGE_SETTINGS), key=str):
        listed = ", ".join(AVERAGE_SETTINGS)
        report(f"settings[{key!r}]", f"is not for averages; allowed are {listed}.{nearest(str(key), AVERAGE_SETTINGS)}")
    if has_module:
        report("module", f"must not be defined, because {_OF} makes it a copy of its source")
    usable = {}
    for key in AVERAGE_SETTINGS[1:]:
        must = _must_be(key, given[key]) if key in given else ""
        if must:
            report(f"settings[{key!r}]", f"must be {must}, but is {given[key]!r}")
        elif key in given:
            usable[key] = given[key]
    return AverageSettings(str(given[_OF]), **usable)


def _must_be(key: str, value: object) -> str:
    """Return what a setting must be, in words, if it is not."""
    # In Python, True is an integer.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if key == "decay":
        is_right = value is None or (is_number and 0 <= value < 1)  # type: ignore[operator]
        return "" if is_right else "a number from 0 to below 1, or None for equal weights"
    if key == "evaluate":
        return "" if value in _EVALUATIONS else '"instead", "beside" or None'
    is_right = isinstance(value, int) and is_number and value >= _MINIMA[key]
    return "" if is_right else f"an integer of {_MINIMA[key]} or more"


def average_problems(modules: Mapping[str, ModuleDefinition]) -> Iterator[tuple[str, str, str]]:
    """Yield averages of modules that do not exist or are not trained: the name, what is wrong, and how to repair it."""
    stand_ins: dict[str, str] = {}
    for name, definition in modules.items():
        average = definition.average
        if average is None:
            continue
        source = modules.get(average.source)
        if source is None:
            known = [other for other, entry in modules.items() if entry.is_trained]
            what = f"{_OF} names {average.source!r}, but the trained modules are {', '.join(known)}."
            yield name, what + nearest(average.source, known), ""
        elif not source.is_trained:
            kind = "frozen" if source.frozen else "an average itself"
            yield name, f"{_OF} must name a trained module, but {average.source} is {kind}", ""
        elif average.evaluate == "instead":
            if average.source in stand_ins:
                what = f"evaluates instead of {average.source}, as modules/{stand_ins[average.source]}.py does already"
                yield name, what, 'set "evaluate": "beside" in one of them'
            stand_ins[average.source] = name


def build_averages(modules: Mapping[str, ModuleDefinition], report: Report) -> dict[str, ModuleDefinition]:
    """Return the modules with a copy of its source in the place of every average; report one that cannot be copied."""
    built = dict(modules)
    for name, definition in modules.items():
        source = modules.get(definition.average.source) if definition.average else None
        if source is None or not source.is_trained:
            continue
        try:
            network = copy.deepcopy(source.module)
        except Exception as error:
            report(name, f"{_OF} needs a copy of its source, but copying it raises {type(error).__name__}: {error}")
        else:
            built[name] = replace(definition, module=network, compile=source.compile, shard=source.shard)
    return built
