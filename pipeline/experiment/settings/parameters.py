"""``settings/parameters.json``: free-form values of the author's, and the optional schema next to it."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from referencing import Registry
from referencing.exceptions import Unresolvable

from pipeline.errors import InvalidExperiment, Problem, UsageError, nearest
from pipeline.experiment.settings.json_source import Document, Json, JsonPath, parse_json, read_document

PARAMETERS = "parameters"
PARAMETERS_FILE = f"{PARAMETERS}.json"
SCHEMA_FILE = f"{PARAMETERS}.schema.json"
# Pymodules read parameters as a mapping, whose methods a name would hide.
_METHOD_NAMES = sorted(name for name in dir(Mapping) if not name.startswith("_"))
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
# What JSON calls the types of Python's values.
_KINDS = ((bool, "true or false"), ((int, float), "a number"), (str, "text"), (list, "a list"), (dict, "an object"))


def read_parameters(folder: Path) -> tuple[dict[str, Json], list[Problem]]:
    """Return the parameters of a settings folder, and what is wrong with them; without a file there are none."""
    path = folder / PARAMETERS_FILE
    has_schema = (folder / SCHEMA_FILE).exists()
    if not path.exists():
        what = f"must lie next to a {PARAMETERS_FILE}, but there is none"
        return {}, [Problem(str(folder / SCHEMA_FILE), what)] if has_schema else []
    try:
        document = read_document(path)
        schema = read_document(folder / SCHEMA_FILE) if has_schema else None
    except InvalidExperiment as error:
        return {}, list(error.problems)
    if not isinstance(document.value, dict):
        return {}, [Problem(str(path), 'must be a JSON object, such as {"lr": 0.001}')]
    problems = [*_name_problems(document), *(_schema_problems(document, schema) if schema else ())]
    return document.value, problems


def check_changed_parameters(folder: Path, values: dict[str, Json]) -> list[Problem]:
    """Return what is wrong with parameters that ``--set`` has changed."""
    changed = Document(Path(f"--set {PARAMETERS}"), "", values)
    schema = read_document(folder / SCHEMA_FILE) if (folder / SCHEMA_FILE).exists() else None
    return [*_name_problems(changed), *(_schema_problems(changed, schema) if schema else ())]


def _name_problems(document: Document) -> Iterator[Problem]:
    """Yield names that pymodules could not write after a dot."""
    for path, name in _names(document.value):
        if name in _METHOD_NAMES:
            what = f"the name {name!r} must not be that of a method of parameters: {', '.join(_METHOD_NAMES)}"
        elif keyword.iskeyword(name):
            what = f"the name {name!r} must not be a keyword of Python"
        elif not _NAME.fullmatch(name):
            what = f"the name {name!r} must begin with a letter and be made of letters, digits, '_' and '-'"
        else:
            continue
        yield Problem(_where(document, (*path, name)), what, f"call it {_suggest(name)!r}, for example")


def _suggest(name: str) -> str:
    suggested = re.sub(r"[^A-Za-z0-9_]+", "_", name).strip("_")
    if not suggested[:1].isalpha():
        suggested = f"p{suggested}"
    return f"{suggested}_" if suggested == name else suggested


def _names(value: Json, path: JsonPath = ()) -> Iterator[tuple[JsonPath, str]]:
    """Yield every name with the path of the object that has it."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield path, name
            yield from _names(inner, (*path, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _names(inner, (*path, index))


def _schema_problems(document: Document, schema: Document) -> Iterator[Problem]:
    """Yield what the author's schema refuses, and what is wrong with the schema itself."""
    try:
        Draft202012Validator.check_schema(schema.value)
        # An empty registry: a reference to another address must not be fetched.
        errors = sorted(
            Draft202012Validator(schema.value, registry=Registry()).iter_errors(document.value),
            key=lambda error: document.offsets.get(tuple(error.absolute_path), 0),
        )
    except SchemaError as error:
        place = _where(schema, tuple(error.absolute_path))
        yield Problem(place, f"must be a JSON Schema of draft 2020-12, but {error.message}")
        return
    except Unresolvable as error:
        what = f"must not refer to anything outside the file, but refers to {error.ref!r}"
        yield Problem(str(schema.path), what, 'put the definition into "$defs" of this file')
        return
    for refused in errors:
        what = f"must follow {SCHEMA_FILE}, but {refused.message}"
        yield Problem(_where(document, tuple(refused.absolute_path)), what)


def _where(document: Document, path: JsonPath) -> str:
    dotted = ".".join(map(str, path))
    return document.place(path) + (f" ({dotted})" if dotted else "")


def override_parameter(parameters: dict[str, Json], name: str, text: str, override: str) -> None:
    """Replace the value of one parameter, which must exist, by one of the same kind."""
    *sections, last = name.split(".")
    holder = parameters
    for number, section in enumerate(sections):
        holder = _get_known(holder, section, sections[:number], override)
        if not isinstance(holder, dict):
            raise UsageError(f"--set {override}: {'.'.join(sections[: number + 1])!r} has no names below it.")
    before = _get_known(holder, last, sections, override)
    try:
        value = parse_json(text)
    except (ValueError, RecursionError):
        # Text needs no quotes on a command line.
        value = text
    wanted = _kind(before)
    if wanted and value is not None and _kind(value) != wanted:
        shown = f"{PARAMETERS_FILE} has {json.dumps(before)}"
        raise UsageError(f"--set {override}: {name} must be {wanted}, because {shown}, but is {json.dumps(value)}.")
    holder[last] = value


def _get_known(holder: dict[str, Json], name: str, sections: list[str], override: str) -> Json:
    if name in holder:
        return holder[name]
    where = ".".join([PARAMETERS, *sections])
    listed = ", ".join(holder) or "none"
    raise UsageError(
        f"--set {override}: no parameter {name!r}; in {where} there are {listed}.{nearest(name, list(holder))}",
        f"add it to settings/{PARAMETERS_FILE} first, with the value that it has without --set",
    )


def _kind(value: Json) -> str | None:
    """Return what JSON would call a value; None for null, in whose place anything may stand."""
    return next((name for kinds, name in _KINDS if isinstance(value, kinds)), None)
