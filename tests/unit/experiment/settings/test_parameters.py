"""settings/parameters.json: read, checked by the author's schema, overridden by --set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.components import Parameters
from pipeline.errors import InvalidExperiment, Problem
from pipeline.experiment.settings import parameters as parameter_files
from pipeline.experiment.settings.settings import differing_overrides, parse_settings, read_contents
from tests.support.experiments import write_experiment

VALUES = {"lr": 0.003, "name": "adam", "widths": [8, 8], "opt": {"beta": 0.9, "warmup": None}, "flag": False}
SCHEMA = {"properties": {"lr": {"type": "number", "maximum": 1}, "name": {"enum": ["adam", "sgd"]}}}


def folder_with(home: Path, parameters: Any = VALUES, schema: Any = None) -> Path:
    """Write the tiny experiment with parameters, given as values or as text; return its settings folder."""
    files = {"parameters": parameters, "parameters.schema": schema}
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in files.items() if value}
    return write_experiment(home, files={f"settings/{name}.json": text for name, text in texts.items()}) / "settings"


def problems_of(folder: Path, *overrides: str) -> list[Problem]:
    with pytest.raises(InvalidExperiment) as raised:
        read_contents(folder, overrides)
    return list(raised.value.problems)


def test_parameters_are_read_as_they_are(tmp_path: Path) -> None:
    """No key has a meaning for us, and none is required."""
    assert parse_settings(read_contents(folder_with(tmp_path))).parameters == VALUES


def test_file_is_optional(home: Path) -> None:
    """Experiments of earlier versions have none."""
    assert parse_settings(read_contents(home / "experiment_settings/tiny/settings")).parameters == {}


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ("[1]", "parameters.json", "must be a JSON object"),
        ('{\n"items": 1}', "parameters.json:2 (items)", "method of parameters: get, items, keys, values"),
        ('{"a": [{\n"lambda": 1}]}', ":2 (a.0.lambda)", "a keyword of Python"),
        ('{\n"l r": 1}', ":2 (l r)", "made of letters"),
        ('{"_lr": 1}', ":1 (_lr)", "begin with a letter"),
        ('{"a.b": 1}', "(a.b)", "made of letters"),
        ('{"lr": NaN}', "parameters.json:1:8", "NaN is not JSON"),
        ('{"lr": 1,\n"lr": 2}', "parameters.json:2:1", "Duplicate key 'lr', which stands in line 1 already"),
        ('{"lr": 1e999}', "parameters.json:1:8", "Number out of range"),
    ],
)
def test_wrong_parameters_are_told_with_their_line(tmp_path: Path, text: str, place: str, what: str) -> None:
    """Names that could not be written after a dot, and what is not JSON, are one sentence each."""
    (problem,) = problems_of(folder_with(tmp_path, text))
    assert place in problem.where
    assert what in problem.what


@pytest.mark.parametrize(
    ("name", "suggested"), [("items", "'items_'"), ("l r", "'l_r'"), ("_lr", "'lr'"), ("3d", "'p3d'"), ("if", "'if_'")]
)
def test_another_name_is_suggested(tmp_path: Path, name: str, suggested: str) -> None:
    """The remedy is a name that works."""
    (problem,) = problems_of(folder_with(tmp_path, {name: 1}))
    assert suggested in problem.fix
    read_contents(folder_with(tmp_path, {suggested.strip("'"): 1}))


def test_names_that_hide_methods_are_all_known() -> None:
    """A method that pymodules get must not be taken away from them by a name."""
    methods = [name for name in dir(Parameters) if not name.startswith("_")]
    assert methods == parameter_files._METHOD_NAMES


def test_schema_of_the_author_is_followed(tmp_path: Path) -> None:
    """A wrong type and a wrong choice are told with their lines, in the file and in --set."""
    folder = folder_with(tmp_path, '{"lr": "high",\n"name": "lion"}', SCHEMA)
    assert [(Path(problem.where).name, problem.what) for problem in problems_of(folder)] == [
        ("parameters.json:1 (lr)", "must follow parameters.schema.json, but 'high' is not of type 'number'"),
        ("parameters.json:2 (name)", "must follow parameters.schema.json, but 'lion' is not one of ['adam', 'sgd']"),
    ]
    (problem,) = problems_of(folder_with(tmp_path, VALUES, SCHEMA), "parameters.lr=3")
    assert problem.where == "--set parameters (lr)"
    assert "3 is greater than the maximum of 1" in problem.what


@pytest.mark.parametrize(
    ("schema", "what"),
    [
        ({"type": "nothing"}, "must be a JSON Schema"),
        ({"$ref": "http://localhost:1/schema.json"}, "must not refer to anything outside"),
        ('{"type": }', "Expected a value"),
    ],
)
def test_wrong_schema_is_told(tmp_path: Path, schema: Any, what: str) -> None:
    """A schema that cannot be followed is refused, and no address is fetched."""
    (problem,) = problems_of(folder_with(tmp_path, VALUES, schema))
    assert "parameters.schema.json" in problem.where
    assert what in problem.what


def test_schema_alone_is_told(tmp_path: Path) -> None:
    """A schema without parameters would silently do nothing."""
    (problem,) = problems_of(folder_with(tmp_path, None, SCHEMA))
    assert "must lie next to a parameters.json" in problem.what


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("lr=3e-4", ["lr"], 3e-4),
        ("lr=1", ["lr"], 1),
        ("name=sgd", ["name"], "sgd"),
        ("opt.beta=0.5", ["opt", "beta"], 0.5),
        ("opt.warmup=10", ["opt", "warmup"], 10),
        ("lr=null", ["lr"], None),
        ("widths=[4]", ["widths"], [4]),
        ("flag=true", ["flag"], True),
    ],
)
def test_parameter_is_set(tmp_path: Path, override: str, path: list[str], value: object) -> None:
    """A value of the same kind takes the place of the one in the file."""
    folder = folder_with(tmp_path)
    found: Any = read_contents(folder, (f"parameters.{override}",))["parameters"]
    for name in path:
        found = found[name]
    assert found == value
    assert json.loads((folder / "parameters.json").read_text()) == VALUES


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("lrr=1", "no parameter 'lrr'; in parameters there are lr, name, widths, opt, flag. Did you mean 'lr'?"),
        ("opt.bet=1", "in parameters.opt there are beta, warmup. Did you mean 'beta'?"),
        ("lr.x=1", "'lr' has no names below it"),
        ("lr=0,1", 'lr must be a number, because parameters.json has 0.003, but is "0,1"'),
        ("lr=true", "must be a number"),
        ("flag=1", "must be true or false"),
        ("widths=8", "must be a list"),
        ("opt=1", "must be an object"),
        ("name=1", "must be text"),
    ],
)
def test_wrong_override_is_told(tmp_path: Path, override: str, what: str) -> None:
    """A name that does not exist would silently do nothing, and another kind of value fail later."""
    (problem,) = problems_of(folder_with(tmp_path), f"parameters.{override}")
    assert what in problem.what


def test_only_other_values_differ_from_frozen_ones(tmp_path: Path) -> None:
    """A job that is requeued repeats its --set."""
    folder = folder_with(tmp_path)
    overrides = ("parameters.lr=0.003", "parameters.opt.beta=0.8")
    assert differing_overrides(read_contents(folder), overrides, folder) == ["parameters.opt.beta=0.8"]
