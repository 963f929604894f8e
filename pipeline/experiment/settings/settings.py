"""Settings: four JSON files, checked against their schemas, as frozen values."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import InvalidExperiment, Problem, UsageError, nearest
from pipeline.experiment.settings.json_source import Document, parse_json, read_document
from pipeline.experiment.settings.validation import SETTINGS_FILES, hint, schema, schema_problems

Contents = dict[str, dict[str, Any]]
FSDP = "fsdp"
# Pairs of keys and values of training.json that exclude one another, and why.
_CONTRADICTIONS = (
    (
        ("gradient_reduction", "exact"),
        ("sync_batchnorm", True),
        "torch adds those statistics in an order that depends on the number of processes",
    ),
    (
        ("parallelism", FSDP),
        ("gradient_reduction", "exact"),
        "torch adds the gradients of shards in an order that depends on the number of processes",
    ),
    (
        ("parallelism", FSDP),
        ("sync_batchnorm", True),
        "its layers were not tried inside modules that are sharded",
    ),
    (
        ("gradient_reduction", "exact"),
        ("on_rank_difference", "broadcast"),
        "a rank that is overwritten has computed other bits before, which exact promises not to happen",
    ),
)


@dataclass(frozen=True)
class LossRegister:
    name: str
    optimize: bool = True
    direction: str = "min"


@dataclass(frozen=True)
class LrScaling:
    base_items: int
    rule: str = "linear"


@dataclass(frozen=True)
class TrainingSettings:
    seed: int = 0
    deterministic: bool = False
    threads: int | None = None
    precision: str = "fp32"
    grad_clip_norm: float | None = None
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
        return self.gradient_reduction == "exact"

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
    progress_bar: bool
    train_updates: int = 100
    eval_updates: int = 20
    every_steps: int = 50
    tensorboard: bool = False
    wandb: WandbSettings = WandbSettings()
    mlflow: MlflowSettings = MlflowSettings()


# The least that each file can say; used to look for further problems when a file is wrong.
_STAND_INS: Contents = {
    "data_loading": {"step_min_items": 1},
    "logging": {"progress_bar": {"enabled": False}},
    "loss_registers": {"loss_registers": ["unknown"]},
    "training": {},
}


@dataclass(frozen=True)
class Settings:
    """Everything the JSON files of an experiment say."""

    step_min_items: int
    logging: LoggingSettings
    loss_registers: tuple[LossRegister, ...]
    training: TrainingSettings
    fingerprint_points: int = 0

    @property
    def register_names(self) -> tuple[str, ...]:
        return tuple(register.name for register in self.loss_registers)


def read_contents(folder: Path, overrides: tuple[str, ...] = ()) -> Contents:
    """Read and check the settings files with overrides applied; all problems are raised at once."""
    problems: list[Problem] = []
    contents: Contents = {}
    for name in SETTINGS_FILES:
        path = folder / f"{name}.json"
        if name == "training" and not path.exists():
            contents[name] = {}
            continue
        try:
            document = read_document(path)
            problems += schema_problems(document, name)
            contents[name] = document.value
        except InvalidExperiment as error:
            problems += error.problems if path.is_file() else [_missing_file(path, name)]
    problems += _unknown_files(folder)
    if problems:
        raise InvalidExperiment(problems)
    overridden = _overridden(contents, overrides)
    _refuse_contradictions(overridden["training"], folder / "training.json")
    return overridden


def readable_contents(folder: Path) -> tuple[Contents, frozenset[str]]:
    """Return what settings files say, with stand-ins for those that are wrong, and the names of these."""
    contents: Contents = {}
    unknown = []
    for name, stand_in in _STAND_INS.items():
        try:
            document = read_document(folder / f"{name}.json")
            is_right = not schema_problems(document, name)
        except InvalidExperiment:
            is_right = False
        contents[name] = document.value if is_right else stand_in
        if not is_right:
            unknown.append(name)
    return contents, frozenset(unknown)


def _refuse_contradictions(training: dict[str, Any], path: Path) -> None:
    """Refuse settings that are right by themselves, but not together."""
    found = [(pair, why) for *pair, why in _CONTRADICTIONS if all(training.get(key) == value for key, value in pair)]
    problems = [
        Problem(
            f"{path} ({first[0]})",
            f"{json.dumps(first[1])} does not go together with {second[0]}: {json.dumps(second[1])}, because {why}",
            "change one of them",
        )
        for (first, second), why in found
    ]
    if problems:
        raise InvalidExperiment(problems)


def _missing_file(path: Path, name: str) -> Problem:
    needed = ", ".join(schema(name).get("required", []))
    return Problem(str(path), "must be a file, but there is none", f"write it; it needs the keys: {needed}")


def _unknown_files(folder: Path) -> list[Problem]:
    known = [f"{name}.json" for name in SETTINGS_FILES]
    found = sorted(path.name for path in folder.glob("*.json")) if folder.is_dir() else []
    return [
        Problem(str(folder / name), f"unknown settings file; known are {', '.join(known)}.{nearest(name, known)}")
        for name in found
        if name not in known
    ]


def parse_settings(contents: Contents) -> Settings:
    """Turn checked contents into values."""
    logging = contents["logging"]
    training = dict(contents["training"])
    scaling = training.pop("lr_scaling", None)
    registers = contents["loss_registers"]["loss_registers"]
    bar = dict(logging["progress_bar"])
    return Settings(
        step_min_items=contents["data_loading"]["step_min_items"],
        fingerprint_points=contents["data_loading"].get("fingerprint_points", 0),
        logging=LoggingSettings(
            progress_bar=bar.pop("enabled"),
            tensorboard=logging.get("tensorboard", {}).get("enabled", False),
            wandb=WandbSettings(**logging.get("wandb", {})),
            mlflow=MlflowSettings(**logging.get("mlflow", {})),
            **bar,
            **logging.get("text", {}),
        ),
        loss_registers=tuple(_register(entry) for entry in registers),
        training=TrainingSettings(**training, lr_scaling=LrScaling(**scaling) if scaling else None),
    )


def _register(entry: str | dict[str, Any]) -> LossRegister:
    return LossRegister(entry) if isinstance(entry, str) else LossRegister(**entry)


def _overridden(contents: Contents, overrides: tuple[str, ...]) -> Contents:
    """Return the contents with every ``FILE.KEY=VALUE`` applied and checked again."""
    if not overrides:
        return contents
    changed: Contents = json.loads(json.dumps(contents))
    for override in overrides:
        _apply(changed, override)
    problems = [
        problem
        for name, content in changed.items()
        for problem in schema_problems(Document(Path(f"--set {name}"), "", content), name)
    ]
    if problems:
        raise InvalidExperiment(problems)
    return changed


def _apply(contents: Contents, override: str) -> None:
    target, equals, text = override.partition("=")
    file, _, key = target.partition(".")
    if not equals or not key:
        holders = [f"{name}.{target}" for name in SETTINGS_FILES if target in schema(name)["properties"]]
        meant = f" Did you mean {holders[0]}={text or '…'}?" if holders else ""
        raise UsageError(f"--set must be FILE.KEY=VALUE, but is {override!r} instead.{meant}")
    if file not in SETTINGS_FILES:
        known = f"there are {', '.join(SETTINGS_FILES)}.{nearest(file, SETTINGS_FILES)}"
        raise UsageError(f"--set {override}: no settings file {file!r}; {known}")
    *parents, last = key.split(".")
    place = contents[file]
    rules = schema(file)
    for part in parents:
        rules = _rules_of(rules, part, override)
        place = place.setdefault(part, {})
        if not isinstance(place, dict):
            raise UsageError(f"--set {override}: {part!r} holds no keys.")
    _rules_of(rules, last, override)
    place[last] = _json_or_text(text)


def _rules_of(rules: dict[str, Any], key: str, override: str) -> dict[str, Any]:
    known: dict[str, Any] = dict(rules.get("properties", {}))
    for alternative in rules.get("oneOf", []):
        known.update(alternative.get("properties", {}))
    if key not in known:
        listed = ", ".join(sorted(known)) or "none"
        raise UsageError(f"--set {override}: unknown key {key!r}; available are {listed}.{hint(key, sorted(known))}")
    found: dict[str, Any] = known[key]
    return found


def _json_or_text(text: str) -> Any:
    try:
        return parse_json(text)
    except (ValueError, RecursionError):
        return text


def differing_overrides(contents: Contents, overrides: tuple[str, ...]) -> list[str]:
    """Return the overrides that would change settings already frozen."""
    if _overridden(contents, overrides) == contents:
        return []
    return [override for override in overrides if _overridden(contents, (override,)) != contents]
