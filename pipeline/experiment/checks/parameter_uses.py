"""Which parameters the pymodules use: found in their text, so that code that was not run counts too."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from pipeline.errors import Problem, nearest
from pipeline.experiment.settings.json_source import Json

_MODULE = "pipeline.components"
_NAME = "parameters"


def doubtful_parameters(folder: Path, parameters: Mapping[str, Json]) -> list[Problem]:
    """Return parameters that no pymodule uses, and uses of parameters that do not exist."""
    problems = []
    used = set[tuple[str, ...]]()
    for path in sorted(folder.rglob("*.py")):
        for where, names in _find_uses(path):
            known, missing = _resolve(names, parameters)
            if missing:
                what = f"parameters.{'.'.join(missing)} is not in settings/parameters.json."
                problems.append(Problem(where, what + nearest(missing[-1], _names_at(parameters, missing[:-1]))))
            else:
                used.add(known)
    settings_file = str(folder.parent / "settings" / "parameters.json")
    for leaf in _leaf_paths(parameters):
        # A use of an object uses all that is in it.
        if not any(leaf[: len(names)] == names for names in used):
            problems.append(Problem(settings_file, f"no pymodule uses {'.'.join(leaf)}"))
    return problems


def _leaf_paths(value: Mapping[str, Json], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from _leaf_paths(inner, (*path, name))
        else:
            yield (*path, name)


def _names_at(value: Json, path: tuple[str, ...]) -> list[str]:
    for name in path:
        value = value[name]
    return list(value)


def _resolve(names: tuple[str, ...], parameters: Mapping[str, Json]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return those of the names that lead to a parameter, and all up to the first that does not exist."""
    value: Json = parameters
    for number, name in enumerate(names):
        # What follows a value is an attribute of it, and parameters.items() is a use of the whole object.
        if not isinstance(value, dict) or (hasattr(Mapping, name) and name not in value):
            return names[:number], ()
        if name not in value:
            return (), names[: number + 1]
        value = value[name]
    return names, ()


def _find_uses(path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield where a file mentions parameters and which: ``parameters.optimizer.lr`` has two names.

    A mention without names may use any of them. Only the import from our components makes a name one of parameters.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        # Reported when the file is imported.
        return
    aliases = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == _MODULE
        for alias in node.names
        if alias.name == _NAME
    }
    inner: set[int] = set()
    for node in ast.walk(tree):
        # ast.walk comes to the longest chain of names first.
        if id(node) not in inner and (chain := _chain(node)) and chain[0] in aliases:
            inner |= {id(child) for child in ast.walk(node)}
            yield f"{path}:{getattr(node, 'lineno', 1)}", chain[1:]


def _chain(node: ast.AST) -> tuple[str, ...]:
    """Return the names of ``a.b["c"]``; empty if the node is something else."""
    match node:
        case ast.Name():
            return (node.id,)
        case ast.Attribute():
            inner = _chain(node.value)
            return (*inner, node.attr) if inner else ()
        case ast.Subscript(slice=ast.Constant(value=str() as key)):
            inner = _chain(node.value)
            return (*inner, key) if inner else ()
    return ()
