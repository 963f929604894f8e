"""Settings: four JSON files, checked against their schemas, overridden by --set, turned into values."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from pipeline.errors import InvalidExperiment, Problem, UsageError
from pipeline.experiment.settings.settings import (
    LoggingSettings,
    LossRegister,
    LrScaling,
    MlflowSettings,
    Settings,
    TrainingSettings,
    WandbSettings,
    differing_overrides,
    parse_settings,
    read_contents,
    with_defaults,
)
from pipeline.experiment.settings.validation import SETTINGS_FILES, schema
from tests.support.experiments import SETTINGS, write_experiment


def folder_with(home: Path, **texts: str) -> Path:
    """Write the tiny experiment with whole settings files replaced; return its settings folder."""
    return write_experiment(home, files={f"settings/{name}.json": text for name, text in texts.items()}) / "settings"


def problems_of(folder: Path, *overrides: str) -> list[Problem]:
    """Return all problems that reading the settings gives."""
    with pytest.raises(InvalidExperiment) as raised:
        read_contents(folder, overrides)
    return list(raised.value.problems)


WRONG = {
    "register with a newline": ("loss_registers", '{"loss_registers": ["a\\n"]}', "registers.0)", "made of letters"),
    "number beyond all sense": ("training", f'{{"grad_clip_norm": 1{"0" * 400}}}', "(grad_clip_norm)", "or less"),
    "items beyond all sense": ("data_loading", '{"step_min_items": 1' + "0" * 30 + "}", "items)", "or less"),
    "unknown key": ("training", '{\n "seed": 1,\n "precison": "bf16"\n}', ":3 (precison)", "mean 'precision'"),
    "nested unknown key": (
        "logging",
        '{"progress_bar": {"enabled": true,\n "train_update": 3}}',
        ":2 (progress_bar.train_update)",
        "mean 'train_updates'",
    ),
    "wrong type": ("training", '{\n\n "seed": "three"\n}', ":3 (seed)", 'of type integer, but is "three"'),
    "bool is no number": ("data_loading", '{"step_min_items": true}', ":1 (step_min_items)", "integer, but is true"),
    "float is no integer": ("data_loading", '{"step_min_items": 1.5}', "(step_min_items)", "integer, but is 1.5"),
    "below range": ("data_loading", '{"step_min_items": 0}', "(step_min_items)", "1 or more, but is 0"),
    "negative": ("training", '{"grad_clip_norm": -1}', "(grad_clip_norm)", "greater than 0, but is -1"),
    "too large": ("training", '{"seed": 9223372036854775808}', "(seed)", "9223372036854775807 or less"),
    "huge integer": ("training", '{"seed": 1' + "0" * 400 + "}", "(seed)", "or less"),
    "not a choice": ("training", '{"precision": "fp8"}', "(precision)", '"fp16"'),
    "missing key of a choice": ("training", '{"lr_scaling": {}}', "(lr_scaling)", "'base_items' is missing"),
    "unknown key of a choice": (
        "training",
        '{"lr_scaling": {"base_items": 3, "rul": "sqrt"}}',
        "(lr_scaling.rul)",
        "mean 'rule'",
    ),
    "register without name": (
        "loss_registers",
        '{"loss_registers": ["loss_a", {"optimize": false}]}',
        "(loss_registers.1)",
        "'name' is missing",
    ),
    "register with a path in it": ("loss_registers", '{"loss_registers": ["../x"]}', "(loss_registers.0)", "letters"),
    "no registers": ("loss_registers", '{"loss_registers": []}', "(loss_registers)", "at least 1"),
    "list in place of object": ("training", "[]", "training.json:1", "object, but is []"),
}


@pytest.mark.parametrize(("file", "text", "place", "what"), WRONG.values(), ids=WRONG.keys())
def test_wrong_settings_are_told_with_place_and_rule(
    tmp_path: Path, file: str, text: str, place: str, what: str
) -> None:
    """Each violation names the file, the line, the key, what was found and what is allowed."""
    (problem,) = problems_of(folder_with(tmp_path, **{file: text}))
    assert f"{file}.json:" in problem.where
    assert place in problem.where
    assert what in problem.what


def test_all_problems_of_all_files_are_told_at_once(tmp_path: Path) -> None:
    """Five mistakes in four files are five entries of one list."""
    folder = folder_with(
        tmp_path, data_loading="{", logging='{"progress_bar": {"enabled": 1, "x": 2}}', training='{"sed": 1}'
    )
    (folder / "loss_registers.json").write_text('{"loss_register": []}')
    files = [Path(problem.where).name.split(".")[0] for problem in problems_of(folder)]
    assert files == ["data_loading", "logging", "logging", "loss_registers", "training"]


def test_problems_of_a_file_come_in_the_order_of_its_lines(tmp_path: Path) -> None:
    """A list that follows the file is worked through from top to bottom."""
    folder = folder_with(tmp_path, training='{\n"seed": -1,\n"zzz": 1,\n"precision": 5,\n"aaa": 1}')
    lines = [int(problem.where.split(":")[-1].split()[0]) for problem in problems_of(folder)]
    assert sorted(lines) == [2, 3, 4, 5]


def test_unknown_settings_file_is_told_with_the_nearest(tmp_path: Path) -> None:
    """A misspelt file would silently do nothing, so it is refused."""
    folder = folder_with(tmp_path)
    (folder / "trainin.json").write_text("{}")
    (problem,) = problems_of(folder)
    assert "trainin.json" in problem.where
    assert "Did you mean 'training.json'?" in problem.what


def test_every_file_is_optional(tmp_path: Path) -> None:
    """Without any file every key has its default; the registers follow from the module transforms."""
    settings = parse_settings(read_contents(tmp_path / "nothing"))
    assert settings == Settings(1, LoggingSettings(), (), TrainingSettings())


@pytest.mark.parametrize("name", SETTINGS_FILES)
def test_filled_contents_mean_the_same(home: Path, name: str) -> None:
    """What the frozen copy says in addition changes nothing, passes its schema, and is filled in once."""
    contents = read_contents(home / "experiment_settings/tiny/settings")
    filled = with_defaults(contents)
    Draft202012Validator(schema(name)).validate(filled[name])
    assert parse_settings(filled) == parse_settings(contents)
    assert with_defaults(filled) == filled


def test_empty_training_file_is_not_an_absent_one(tmp_path: Path) -> None:
    """A training.json that went wrong never falls back to the defaults."""
    (problem,) = problems_of(folder_with(tmp_path, training=""))
    assert "empty" in problem.what


def test_values_come_out_as_written(tmp_path: Path) -> None:
    """Names alone and objects make registers; nested settings arrive at their place."""
    write_experiment(tmp_path, training={"lr_scaling": {"base_items": 7, "rule": "sqrt"}})
    settings = parse_settings(read_contents(tmp_path / "experiment_settings/tiny/settings"))
    assert settings.step_min_items == SETTINGS["data_loading"]["step_min_items"]
    assert settings.loss_registers[0] == LossRegister("loss_a", optimize=True, direction="min")
    assert settings.loss_registers[2] == LossRegister("error", optimize=False)
    assert settings.training.lr_scaling == LrScaling(7, "sqrt")
    assert settings.logging.every_steps == 2


@pytest.mark.parametrize("name", SETTINGS_FILES)
def test_schema_is_valid_and_closed(name: str) -> None:
    """Every shipped schema is JSON Schema 2020-12 and knows all of its keys."""
    rules = schema(name)
    Draft202012Validator.check_schema(rules)
    assert rules["$schema"].endswith("2020-12/schema")
    assert rules["additionalProperties"] is False


def defaults_of(kind: type) -> dict[str, Any]:
    """Return the defaults of a dataclass, without the fields that have none."""
    fields = dataclasses.fields(kind)
    made = {field.name: field.default_factory() for field in fields if field.default_factory is not dataclasses.MISSING}
    return {field.name: field.default for field in fields if field.default is not dataclasses.MISSING} | made


def schema_defaults(rules: dict[str, Any]) -> dict[str, Any]:
    """Return the defaults that the properties of a schema name."""
    return {key: one["default"] for key, one in rules["properties"].items() if "default" in one}


def test_training_defaults_are_those_of_the_schema() -> None:
    """What the schema documents is what runs, for every key."""
    rules = schema("training")
    assert defaults_of(TrainingSettings) == schema_defaults(rules)
    assert set(rules["properties"]) == {field.name for field in dataclasses.fields(TrainingSettings)}


def test_logging_defaults_are_those_of_the_schema() -> None:
    """The defaults of the logging file agree, except those of switches named after their section."""
    properties = schema("logging")["properties"]
    bar = schema_defaults(properties["progress_bar"])
    expected = {"progress_bar": bar.pop("enabled"), **bar, **schema_defaults(properties["text"])}
    found = defaults_of(LoggingSettings)
    assert {key: found[key] for key in expected} == expected
    assert found["tensorboard"] == schema_defaults(properties["tensorboard"])["enabled"]
    assert defaults_of(WandbSettings) == schema_defaults(properties["wandb"])
    assert defaults_of(MlflowSettings) == schema_defaults(properties["mlflow"])


def test_register_and_scaling_defaults_are_those_of_the_schema() -> None:
    """The defaults inside lists and choices agree too."""
    register = schema("loss_registers")["properties"]["loss_registers"]["items"]["oneOf"][1]
    scaling = schema("training")["properties"]["lr_scaling"]["oneOf"][1]
    assert defaults_of(LossRegister) == {**schema_defaults(register), "splits": ("train", "val")}
    assert schema_defaults(register)["splits"] == ["train", "val"]
    assert defaults_of(LrScaling) == schema_defaults(scaling)


OVERRIDES = {
    "number": ("data_loading.step_min_items=128", ("data_loading", "step_min_items"), 128),
    "text": ("training.precision=bf16", ("training", "precision"), "bf16"),
    "null": ("training.grad_clip_norm=null", ("training", "grad_clip_norm"), None),
    "bool": ("training.deterministic=true", ("training", "deterministic"), True),
    "nested": ("logging.progress_bar.train_updates=7", ("logging", "progress_bar", "train_updates"), 7),
    "section not in the file": ("logging.tensorboard.enabled=true", ("logging", "tensorboard", "enabled"), True),
    "object": ('training.lr_scaling={"base_items": 4}', ("training", "lr_scaling", "base_items"), 4),
    "list": ('loss_registers.loss_registers=["a"]', ("loss_registers", "loss_registers", 0), "a"),
}


@pytest.mark.parametrize(("override", "path", "value"), OVERRIDES.values(), ids=OVERRIDES.keys())
def test_override_changes_the_value_it_names(home: Path, override: str, path: tuple[Any, ...], value: object) -> None:
    """--set FILE.KEY=VALUE puts a JSON value, or else plain text, at its place."""
    found: Any = read_contents(home / "experiment_settings/tiny/settings", (override,))
    for part in path:
        found = found[part]
    assert found == value


BAD_OVERRIDES = {
    "no value": ("training.seed", "FILE.KEY=VALUE"),
    "no key": ("training=3", "FILE.KEY=VALUE"),
    "empty": ("", "FILE.KEY=VALUE"),
    "unknown file": ("trainng.seed=1", "data_loading, logging, loss_registers, training"),
    "unknown key": ("training.sed=1", "available are .*seed.*Did you mean 'seed'"),
    "unknown nested key": ("logging.progress_bar.x=1", "available are enabled, eval_updates, train_updates"),
    "key below a value": ("training.seed.x=1", "seed"),
    "empty key": ("training.=1", "FILE.KEY=VALUE"),
}


@pytest.mark.parametrize(("override", "message"), BAD_OVERRIDES.values(), ids=BAD_OVERRIDES.keys())
def test_bad_override_path_names_what_is_available(home: Path, override: str, message: str) -> None:
    """A path that leads nowhere is refused with the keys that exist there."""
    with pytest.raises(UsageError, match=message):
        read_contents(home / "experiment_settings/tiny/settings", (override,))


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("training.seed=-1", "0 or more, but is -1"),
        ("training.precision=fp8", "one of"),
        ("data_loading.step_min_items=many", 'integer, but is "many"'),
        ("training.seed=", "integer"),
    ],
)
def test_bad_override_value_is_told_like_one_in_a_file(home: Path, override: str, what: str) -> None:
    """A value that breaks the schema is refused with its key and what is allowed."""
    (problem,) = problems_of(home / "experiment_settings/tiny/settings", override)
    assert "--set" in problem.where
    assert override.split("=")[0].split(".")[1] in problem.where
    assert what in problem.what


def test_override_leaves_the_file_alone(home: Path) -> None:
    """Settings as written are never changed on disk."""
    path = home / "experiment_settings/tiny/settings/training.json"
    before = path.read_bytes()
    read_contents(path.parent, ("training.seed=99",))
    assert path.read_bytes() == before


def test_only_overrides_that_would_change_something_differ(home: Path) -> None:
    """A restarted command line that repeats what is frozen already is no contradiction."""
    contents = read_contents(home / "experiment_settings/tiny/settings")
    overrides = ("training.seed=3", "training.seed=4", "data_loading.step_min_items=14")
    assert differing_overrides(contents, overrides, home / "experiment_settings/tiny/settings") == ["training.seed=4"]


def test_contents_are_plain_json(home: Path) -> None:
    """What goes into the frozen copy can be written as JSON and read back alike."""
    contents = read_contents(home / "experiment_settings/tiny/settings", ("training.seed=5",))
    assert json.loads(json.dumps(contents)) == contents


@pytest.mark.parametrize("item", ["1", '{"x": 1}', '"a b"'])
def test_flood_of_problems_is_cut(tmp_path: Path, item: str) -> None:
    """A large file of nonsense is refused at once, with its first problems only."""
    text = f'{{"loss_registers": [{",".join([item] * 50_000)}]}}'
    assert len(problems_of(folder_with(tmp_path, loss_registers=text))) == 100


def test_exact_on_a_gpu_implies_deterministic_kernels() -> None:
    """Sums in a fixed order are of no use if the numbers differ; a CPU needs no such kernels."""
    exact = TrainingSettings(gradient_reduction="exact")
    assert [exact.uses_deterministic_kernels(device) for device in ("cuda", "cpu")] == [True, False]
    fast = TrainingSettings()
    assert [fast.uses_deterministic_kernels(device) for device in ("cuda", "cpu")] == [False, False]
    asked = TrainingSettings(deterministic=True)
    assert [asked.uses_deterministic_kernels(device) for device in ("cuda", "cpu")] == [True, True]
