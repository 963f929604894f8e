"""Settings: JSON files, checked against their schemas, as frozen values."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pipeline.errors import InvalidExperiment, Problem, UsageError, nearest
from pipeline.experiment.pymodules.assumptions import MAX_EPOCHS
from pipeline.experiment.settings.engines import ENGINES
from pipeline.experiment.settings.json_source import Document, Json, parse_json, read_document
from pipeline.experiment.settings.parameters import (
    PARAMETERS,
    PARAMETERS_FILE,
    SCHEMA_FILE,
    check_changed_parameters,
    override_parameter,
    read_parameters,
)
from pipeline.experiment.settings.validation import (
    SETTINGS_FILES,
    contradiction_problems,
    hint,
    schema,
    schema_problems,
)

# What the settings files say, by file and key: what overrides change and what is frozen into the copy.
Contents = dict[str, dict[str, Json]]
# What a command line may change of a module, though it is not a settings file.
_MODULES = "modules"
_CKP = "load_weights_from_ckp"


# The defaults below are those of the schemas; a test compares them.
@dataclass(frozen=True)
class LossRegister:
    name: str
    optimize: bool = True
    direction: str = "min"
    # What there is one value for: "item", "batch" or, of a metric, "split".
    per: str = "item"
    splits: tuple[str, ...] = ("train", "val")

    @property
    def is_metric(self) -> bool:
        return self.per == "split"


@dataclass(frozen=True)
class LrScaling:
    base_items: int
    rule: str = "linear"


@dataclass(frozen=True)
class TrainingSettings:
    seed: int = 0
    max_epochs: int | None = None
    max_steps: int | None = None
    init_from: str | None = None
    module_weights: dict[str, str] = field(default_factory=dict)
    deterministic: bool = False
    threads: int | None = None
    precision: str = "fp32"
    grad_clip_norm: float | None = None
    turns: tuple[tuple[str, ...], ...] | None = None
    share_batches: bool = False
    loss_reduction: str = "mean"
    gradient_reduction: str = "fast"
    parallelism: str = "ddp"
    sync_batchnorm: bool = False
    on_rank_difference: str = "error"
    checkpoint_every_steps: int | None = None
    checkpoint_every_minutes: float | None = 10
    checkpoint_in_background: bool = True
    evaluation_interval: int = 1
    max_consecutive_nan_steps: int = 10
    lr_scaling: LrScaling | None = None

    @property
    def is_exact(self) -> bool:
        return ENGINES[self.gradient_reduction].is_exact

    @property
    def shards_modules(self) -> bool:
        """Return whether each of several processes holds shards of the modules."""
        return self.parallelism in ENGINES

    def uses_deterministic_kernels(self, device_type: str) -> bool:
        """Return whether torch must choose deterministic kernels; off the CPU, exact sums need them."""
        return self.deterministic or (self.is_exact and device_type != "cpu")


@dataclass(frozen=True)
class WandbSettings:
    enabled: bool = False
    project: str = "training_pipeline"
    entity: str | None = None
    mode: str = "online"


@dataclass(frozen=True)
class MlflowSettings:
    enabled: bool = False
    tracking_uri: str | None = None


@dataclass(frozen=True)
class LoggingSettings:
    progress_bar: bool = True
    train_updates: int = 100
    eval_updates: int = 20
    every_steps: int = 50
    artifacts_max_mb: int = 64
    tensorboard: bool = False
    wandb: WandbSettings = WandbSettings()
    mlflow: MlflowSettings = MlflowSettings()


@dataclass(frozen=True)
class Settings:
    """Everything the JSON files of an experiment say.

    ``loss_registers`` is empty until the module transforms are read, if no file lists them.
    """

    step_min_items: int
    logging: LoggingSettings
    loss_registers: tuple[LossRegister, ...]
    training: TrainingSettings
    steps_per_epoch: int | None = None
    mixture: dict[str, float] | None = None
    limit_batches: int | None = None
    fingerprint_points: int = 0
    # What parameters.json says, as it is.
    parameters: dict[str, Json] = field(default_factory=dict)

    @property
    def register_names(self) -> tuple[str, ...]:
        """The registers that module transforms feed: all but those of metrics."""
        return tuple(register.name for register in self.loss_registers if not register.is_metric)

    def registers_of(self, split: str) -> tuple[LossRegister, ...]:
        """Return the registers that module transforms feed in a split; any but ``train`` has those of ``val``."""
        named = "train" if split == "train" else "val"
        return tuple(
            register for register in self.loss_registers if named in register.splits and not register.is_metric
        )


def read_contents(folder: Path, overrides: tuple[str, ...] = ()) -> Contents:
    """Read and check the settings files with overrides applied; all problems are raised at once."""
    problems: list[Problem] = []
    contents: Contents = {}
    for name in SETTINGS_FILES:
        path = folder / f"{name}.json"
        # Every key has a default. A file that exists but is empty is still an error.
        if not os.path.lexists(path):
            contents[name] = {}
            continue
        try:
            document = read_document(path)
        except InvalidExperiment as error:
            problems += error.problems
            continue
        problems += schema_problems(document, name)
        contents[name] = document.value
    contents[PARAMETERS], parameter_problems = read_parameters(folder)
    problems += parameter_problems
    # A misspelt file name would silently change nothing.
    known = [*(f"{name}.json" for name in SETTINGS_FILES), PARAMETERS_FILE, SCHEMA_FILE]
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        if path.name not in known:
            what = f"unknown settings file; known are {', '.join(known)}.{nearest(path.name, known)}"
            problems.append(Problem(str(path), what))
    if problems:
        raise InvalidExperiment(problems)
    contents = apply_overrides(contents, overrides, folder)
    # Only now: an override may cause a contradiction, or resolve one that the file has.
    problems += contradiction_problems(contents, folder)
    if problems:
        raise InvalidExperiment(problems)
    return contents


def readable_contents(folder: Path) -> tuple[Contents, frozenset[str]]:
    """Return what the settings files say, nothing for wrong files, and the names of those files."""
    contents: Contents = {}
    wrong: set[str] = set()
    for name in SETTINGS_FILES:
        path = folder / f"{name}.json"
        contents[name] = {}
        if not os.path.lexists(path):
            continue
        try:
            document = read_document(path)
            is_valid = not schema_problems(document, name)
        except InvalidExperiment:
            is_valid = False
        if is_valid:
            contents[name] = document.value
        else:
            wrong.add(name)
    contents[PARAMETERS], problems = read_parameters(folder)
    if problems:
        wrong.add(PARAMETERS)
    return contents, frozenset(wrong)


def parse_settings(contents: Contents) -> Settings:
    """Turn checked contents into values."""
    contents = with_defaults(contents)
    data_loading = contents["data_loading"]
    logging = contents["logging"]
    # The sections of logging.json are one flat value here; the bar's own switch is named after its section.
    progress_bar = dict(logging["progress_bar"])
    training = dict(contents["training"])
    scaling = training.pop("lr_scaling", None)
    turns = training.pop("turns", None)
    return Settings(
        **data_loading,
        parameters=contents[PARAMETERS],
        logging=LoggingSettings(
            progress_bar=progress_bar.pop("enabled"),
            artifacts_max_mb=logging["artifacts"]["max_mb"],
            tensorboard=logging["tensorboard"]["enabled"],
            wandb=WandbSettings(**logging["wandb"]),
            mlflow=MlflowSettings(**logging["mlflow"]),
            **progress_bar,
            **logging["text"],
        ),
        loss_registers=tuple(map(_parse_register, contents["loss_registers"].get("loss_registers", []))),
        training=TrainingSettings(
            **training,
            lr_scaling=LrScaling(**scaling) if scaling else None,
            turns=tuple(map(tuple, turns)) if turns else None,
        ),
    )


def _parse_register(entry: Json) -> LossRegister:
    # A register with defaults only may be written as its name alone.
    register = LossRegister(entry) if isinstance(entry, str) else LossRegister(**entry)
    if register.is_metric:
        return replace(register, optimize=False, splits=("val",))
    return replace(register, splits=tuple(register.splits))


def register_contents(registers: Iterable[LossRegister]) -> dict[str, Json]:
    """Return what loss_registers.json says of these registers."""
    default = LossRegister("")
    return {
        "loss_registers": [
            asdict(register) if replace(register, name="") != default else register.name for register in registers
        ]
    }


def fill_in(contents: Contents, folder: Path) -> Contents:
    """Return the contents of an experiment's folder with everything that is assumed: defaults, and an end."""
    filled = with_defaults(contents)
    training = filled["training"]
    has_stopper = (folder / "pymodules" / "early_stopper.py").exists()
    if not has_stopper and training["max_epochs"] is None and training["max_steps"] is None:
        training["max_epochs"] = MAX_EPOCHS
    return filled


def with_defaults(contents: Contents) -> Contents:
    """Return the contents with a value for every key that a file leaves out and that has a default."""
    filled = {name: _fill(contents[name], schema(name)) for name in SETTINGS_FILES}
    return {**contents, **filled}


def _fill(value: Json, rules: dict[str, Json]) -> Json:
    filled = {}
    for key, rule in rules["properties"].items():
        if isinstance(value.get(key), dict):
            # Of several alternatives, the one with keys is meant.
            meant = next((one for one in rule.get("oneOf", [rule]) if "properties" in one), None)
            filled[key] = _fill(value[key], meant) if meant else value[key]
        elif key in value:
            filled[key] = value[key]
        elif "default" in rule:
            filled[key] = rule["default"]
        elif "properties" in rule:
            filled[key] = _fill({}, rule)
    return filled


def apply_overrides(contents: Contents, overrides: tuple[str, ...], folder: Path) -> Contents:
    """Return the contents with every ``FILE.KEY=VALUE`` applied and checked against the schemas again.

    ``folder`` is that of the settings files.
    """
    if not overrides:
        return contents
    changed: Contents = json.loads(json.dumps(contents))
    for override in overrides:
        _apply_override(changed, override)
    problems = [
        problem
        for name in SETTINGS_FILES
        for problem in schema_problems(Document(Path(f"--set {name}"), "", changed[name]), name)
    ]
    if changed[PARAMETERS] != contents[PARAMETERS]:
        problems += check_changed_parameters(folder, changed[PARAMETERS])
    if problems:
        raise InvalidExperiment(problems)
    return changed


def _apply_override(contents: Contents, override: str) -> None:
    target, equals, text = override.partition("=")
    file, _, key = target.partition(".")
    if not equals or not key:
        holders = [f"{name}.{target}" for name in SETTINGS_FILES if target in schema(name)["properties"]]
        suggestion = f" Did you mean {holders[0]}={text or '…'}?" if holders else ""
        raise UsageError(f"--set must be FILE.KEY=VALUE, but is {override!r} instead.{suggestion}")
    if file == _MODULES:
        _override_source(contents, key, text, override)
        return
    if file == PARAMETERS:
        override_parameter(contents[PARAMETERS], key, text, override)
        return
    if file not in SETTINGS_FILES:
        files = [*SETTINGS_FILES, PARAMETERS]
        raise UsageError(
            f"--set {override}: no settings file {file!r}; there are {', '.join(files)}.{nearest(file, files)}"
        )
    *sections, last = key.split(".")
    section = contents[file]
    rules = schema(file)
    for name in sections:
        # The schema decides whether a section exists: the file may have left it out.
        rules = _rules_below(rules, name, override)
        section = section.setdefault(name, {})
        if not isinstance(section, dict):
            raise UsageError(f"--set {override}: {name!r} has no keys below it.")
    _rules_below(rules, last, override)
    try:
        section[last] = parse_json(text)
    except (ValueError, RecursionError):
        # Text needs no quotes on a command line. If it was meant as JSON, the schema refuses it.
        section[last] = text


def _override_source(contents: Contents, key: str, text: str, override: str) -> None:
    """Apply ``modules.NAME.load_weights_from_ckp=FILE``, the one setting of module files on command lines."""
    module, _, setting = key.partition(".")
    if setting != _CKP:
        what = f"--set {override}: of a module only {_CKP} can be set, as in modules.NAME.{_CKP}=FILE."
        raise UsageError(what + nearest(setting, [_CKP]))
    contents["training"].setdefault("module_weights", {})[module] = str(Path(text).absolute())


def _rules_below(rules: dict[str, Json], key: str, override: str) -> dict[str, Json]:
    """Return the part of a schema that describes a key, in whichever alternative it is defined."""
    known: dict[str, dict[str, Json]] = dict(rules.get("properties", {}))
    for alternative in rules.get("oneOf", []):
        known.update(alternative.get("properties", {}))
    if isinstance(rules.get("additionalProperties"), dict):
        # The keys are names of the author's.
        return dict(rules["additionalProperties"])
    if key not in known:
        listed = ", ".join(sorted(known)) or "none"
        raise UsageError(f"--set {override}: unknown key {key!r}; available are {listed}.{hint(key, sorted(known))}")
    return known[key]


def differing_overrides(contents: Contents, overrides: tuple[str, ...], folder: Path) -> list[str]:
    """Return the overrides that would change settings already frozen in ``folder``."""
    # Together first: a restarted command repeats overrides that are frozen, of which a later one may undo an earlier.
    if apply_overrides(contents, overrides, folder) == contents:
        return []
    return [override for override in overrides if apply_overrides(contents, (override,), folder) != contents]
