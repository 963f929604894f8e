"""JSON Schema violations as sentences that name file, line, key, value and what is allowed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import islice
from pathlib import Path

from jsonschema import Draft202012Validator, validators
from jsonschema.exceptions import ValidationError

from pipeline.errors import Problem, nearest
from pipeline.experiment.settings.engines import ENGINES, keys_of_engines
from pipeline.experiment.settings.json_source import Document, Json, JsonPath

SETTINGS_FILES = ("data_loading", "logging", "loss_registers", "training")
_MAX_PROBLEMS = 100
# What other trainers call things, and where they are set here.
_OPTIMIZER = (
    "the optimizer and its learning rate are created in pymodules/optim_sched/*.py; a value that you tune goes into "
    "settings/parameters.json"
)
_STEPS = (
    "a step takes batches until it holds step_min_items items (settings/data_loading.json); the size of one batch is "
    "batch_size in pymodules/dataloaders/*.py"
)
_LOADING = "it is an argument in pymodules/dataloaders/*.py"
_LENGTH = "training ends after max_epochs or max_steps, both in settings/training.json"
_PATIENCE = "it is an argument of the early stopper in pymodules/early_stopper.py"
_PROCESSES = "torchrun --nproc-per-node=N decides; each process takes one accelerator, or none with --device cpu"
_HINTS = {
    **dict.fromkeys(("lr", "learning_rate", "optimizer", "optim", "weight_decay", "scheduler"), _OPTIMIZER),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches", "accumulation_steps"), _STEPS),
    **dict.fromkeys(("batch_size", "per_device_train_batch_size", "num_workers", "dataloader_num_workers"), _LOADING),
    **dict.fromkeys(("epochs", "max_epochs", "num_epochs", "num_train_epochs", "max_steps", "max_iters"), _LENGTH),
    "patience": _PATIENCE,
    **dict.fromkeys(("device", "devices", "accelerator", "gpus", "num_gpus", "world_size", "strategy"), _PROCESSES),
    **dict.fromkeys(("fp16", "bf16", "amp", "mixed_precision"), "precision in settings/training.json decides"),
    **dict.fromkeys(
        ("max_grad_norm", "gradient_clip_val", "clip_grad", "grad_clip"),
        "it is grad_clip_norm in settings/training.json",
    ),
    **dict.fromkeys(
        ("save_steps", "save_every", "save_interval"), "it is checkpoint_every_steps in settings/training.json"
    ),
    **dict.fromkeys(
        ("eval_steps", "eval_interval", "val_interval", "val_check_interval", "check_val_every_n_epoch"),
        "evaluations come after epochs: steps_per_epoch in settings/data_loading.json says how long one is, and "
        "evaluation_interval in settings/training.json after how many",
    ),
    **dict.fromkeys(
        ("limit_train_batches", "limit_val_batches", "fast_dev_run", "overfit_batches"),
        "start a quick try with --limit-batches N",
    ),
    **dict.fromkeys(
        ("steps_per_epoch", "epoch_steps", "step_min_items", "mixture"), "it is in settings/data_loading.json"
    ),
}


def hint(key: str, known: Sequence[str]) -> str:
    """Return where the thing that an unknown key names is set, or the nearest known key."""
    # Hints first: the nearest key may mean something else. That of eval_steps is checkpoint_every_steps.
    return f" For {key}: {_HINTS[key]}." if key in _HINTS else nearest(key, known)


def schema(name: str) -> dict[str, Json]:
    """Return the schema of ``settings/<name>.json``."""
    loaded: dict[str, Json] = json.loads(_schema_text(name))
    if name == "training":
        for engine, key in keys_of_engines().items():
            loaded["properties"][key]["enum"].append(engine)
    return loaded


@cache
def _schema_text(name: str) -> str:
    return (files("pipeline.experiment.settings") / "schemas" / f"{name}.json").read_text()


def _is_integer(checker: object, value: object) -> bool:
    """JSON Schema takes 7.0 for an integer, but as a seed it would key everything random differently from 7."""
    return isinstance(value, int) and not isinstance(value, bool)


_Validator = validators.extend(  # type: ignore[no-untyped-call]
    Draft202012Validator, type_checker=Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_integer)
)


def schema_problems(document: Document, name: str) -> list[Problem]:
    """Return every violation in the order of the file's lines, but no more than the first hundred."""
    errors = _Validator(schema(name)).iter_errors(document.value)
    # Both are cut: a file of 50,000 wrong entries has as many errors, and one error may name as many unknown keys.
    causes = list(islice((cause for error in errors for cause in _likely_causes(error)), _MAX_PROBLEMS))
    causes.sort(key=lambda error: document.offsets.get(tuple(error.absolute_path), 0))
    return list(islice((problem for error in causes for problem in _problems(document, error)), _MAX_PROBLEMS))


def _likely_causes(error: ValidationError) -> Iterator[ValidationError]:
    """Replace a failed choice by what is wrong with the alternative that the author most likely meant."""
    if error.validator != "oneOf" or not error.context:
        yield error
        return
    alternatives: dict[int, list[ValidationError]] = {}
    for inner in error.context:
        alternatives.setdefault(int(inner.schema_path[0]), []).append(inner)
    # An alternative of the right type was meant; if none has it, the choice itself is what is wrong.
    fitting = [group for group in alternatives.values() if not any(inner.validator == "type" for inner in group)]
    yield from fitting[0] if fitting else [error]


def _problems(document: Document, error: ValidationError) -> Iterator[Problem]:
    path = tuple(error.absolute_path)
    instance: Json = error.instance
    rules: Json = error.schema
    if error.validator == "additionalProperties":
        known = sorted(rules["properties"])
        for key in sorted(set(instance) - set(known)):
            what = f"unknown key {key!r}; allowed are {', '.join(known)}.{hint(key, known)}"
            yield Problem(_where(document, (*path, key)), what)
    elif error.validator == "required":
        # jsonschema reports each missing key on its own; the message names it first.
        key = next(key for key in rules["required"] if error.message.startswith(repr(key)))
        wanted = rules["properties"][key]
        must = f"one of {_shorten(wanted['enum'])}" if "enum" in wanted else f"of type {_name_types(wanted)}"
        yield Problem(_where(document, path), f"key {key!r} is missing; it must be {must}")
    else:
        limit = error.validator_value
        sentences = {
            "type": f"of type {_name_types(rules)}",
            "oneOf": f"of type {_name_types(rules)}",
            "enum": f"one of {_shorten(limit)}",
            "minimum": f"{limit} or more",
            "maximum": f"{limit} or less",
            "exclusiveMinimum": f"greater than {limit}",
            "minLength": f"at least {limit} character long",
            "minItems": f"a list of at least {limit}",
            "minProperties": f"an object with at least {limit} key",
            "pattern": "made of letters, digits, '_', '-' and '.'",
        }
        must = sentences.get(str(error.validator), error.message)
        yield Problem(_where(document, path), f"must be {must}, but is {_shorten(instance)} instead")


def _where(document: Document, path: JsonPath) -> str:
    dotted = ".".join(str(part) for part in path)
    return document.place(path) + (f" ({dotted})" if dotted else "")


def _name_types(rules: Mapping[str, Json]) -> str:
    """Return the types that a part of a schema allows, in words."""
    if "oneOf" in rules:
        # An alternative without a type refers to the definition of a name, which is a string.
        return " or ".join(str(rule.get("type", "string")) for rule in rules["oneOf"])
    types = rules.get("type", "string")
    return " or ".join(map(str, types)) if isinstance(types, list) else str(types)


def _shorten(value: Json) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def contradiction_problems(contents: Mapping[str, Mapping[str, Json]], folder: Path) -> Iterator[Problem]:
    """Yield settings that are valid by themselves, but not together."""
    training = contents["training"]
    path = folder / "training.json"
    yield from _mixture_contradictions(contents, folder / "data_loading.json")
    yield from _register_contradictions(contents, folder / "loss_registers.json")
    for engine, key in keys_of_engines().items():
        if training.get(key) != engine:
            continue
        for (other_key, value), why in ENGINES[engine].excludes.items():
            if training.get(other_key) == value:
                what = f"does not go together with {other_key}: {json.dumps(value)}, because {why}"
                yield Problem(f"{path} ({key})", f"{json.dumps(engine)} {what}", "change one of them")


def _register_contradictions(contents: Mapping[str, Mapping[str, Json]], path: Path) -> Iterator[Problem]:
    """Yield registers that are to be optimised, but are not recorded in training."""
    for index, register in enumerate(contents.get("loss_registers", {}).get("loss_registers", [])):
        if isinstance(register, dict) and register.get("per") == "split":
            if register.get("optimize", False) or "train" in register.get("splits", ["val"]):
                what = f"register {register['name']!r} is of a metric, which evaluations compute"
                yield Problem(f"{path} (loss_registers.{index})", what, 'remove "optimize" and "splits"')
            continue
        is_optimised = isinstance(register, dict) and register.get("optimize", True)
        if is_optimised and "train" not in register.get("splits", ["train"]):
            what = f"register {register['name']!r} must be recorded in training to be optimised, but its splits are val"
            yield Problem(f"{path} (loss_registers.{index})", what, 'add "optimize": false, or remove "splits"')


def _mixture_contradictions(contents: Mapping[str, Mapping[str, Json]], path: Path) -> Iterator[Problem]:
    """Yield what does not go together with ``mixture``, which says by itself what a step holds."""
    loading = contents["data_loading"]
    if not loading.get("mixture"):
        return
    if loading.get("steps_per_epoch") is None:
        what = "needs steps_per_epoch: mixed datasets do not end together, so an epoch cannot be one pass"
        yield Problem(f"{path} (mixture)", what, 'add "steps_per_epoch": 100, for example')
    # The frozen copy says 1, which is what the key is if it is left out.
    if loading.get("step_min_items", 1) != 1:
        what = "does not go together with mixture, whose weights say how many batches a step has"
        yield Problem(f"{path} (step_min_items)", what, "remove one of them")
    if contents["training"].get("lr_scaling"):
        what = "does not go together with mixture: it scales by step_min_items, which mixture replaces"
        yield Problem(f"{path.with_name('training.json')} (lr_scaling)", what, "remove one of them")
