"""JSON Schema violations as sentences that name file, line, key, value and what is allowed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.resources import files
from itertools import islice
from typing import Any, cast

from jsonschema import Draft202012Validator, validators
from jsonschema.exceptions import ValidationError

from pipeline.errors import Problem, nearest
from pipeline.experiment.settings.json_source import Document

# JSON Schema takes 7.0 for an integer; here it would make another key of everything random than 7 does.
_Validator = validators.extend(  # type: ignore[no-untyped-call]
    Draft202012Validator,
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine(
        "integer", lambda checker, value: isinstance(value, int) and not isinstance(value, bool)
    ),
)
SETTINGS_FILES = ("data_loading", "logging", "loss_registers", "training")
_MAX_PROBLEMS = 100


# What other trainers call things, and where they are here.
_OPTIMIZER = "the optimizer and its learning rate are created in pymodules/optim_sched/*.py"
_STEPS = (
    "a step takes batches until it holds step_min_items items (settings/data_loading.json); the size of one batch is "
    "batch_size in pymodules/dataloaders/*.py"
)
_LOADING = "it is an argument in pymodules/dataloaders/*.py"
_LENGTH = "training ends after max_epochs of the early stopper in pymodules/early_stopper.py"
_PROCESSES = "torchrun --nproc-per-node=N decides; each process takes one accelerator, or none with --device cpu"
_HINTS = {
    **dict.fromkeys(("lr", "learning_rate", "optimizer", "optim", "weight_decay", "scheduler"), _OPTIMIZER),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches", "accumulation_steps"), _STEPS),
    **dict.fromkeys(("batch_size", "per_device_train_batch_size", "num_workers", "dataloader_num_workers"), _LOADING),
    **dict.fromkeys(("epochs", "max_epochs", "num_epochs", "num_train_epochs", "max_steps", "patience"), _LENGTH),
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
        ("eval_steps", "eval_interval", "val_interval", "check_val_every_n_epoch"),
        "it is evaluation_interval, in epochs, in settings/training.json",
    ),
}


def hint(key: str, known: Sequence[str]) -> str:
    """Return where the thing that an unknown key names is set, or the nearest known key."""
    return f" For {key}: {_HINTS[key]}." if key in _HINTS else nearest(key, known)


def schema(name: str) -> dict[str, Any]:
    """Return the schema of ``settings/<name>.json``."""
    text = (files("pipeline.experiment.settings") / "schemas" / f"{name}.json").read_text()
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def schema_problems(document: Document, name: str) -> list[Problem]:
    """Return every violation in the order in which the file shows them; of a flood, the beginning."""
    errors = _Validator(schema(name)).iter_errors(document.value)
    leaves = list(islice((leaf for error in errors for leaf in _leaves(error)), _MAX_PROBLEMS))
    leaves.sort(key=lambda error: document.offsets.get(tuple(error.absolute_path), 0))
    return list(islice((problem for error in leaves for problem in _problems(document, error)), _MAX_PROBLEMS))


def _leaves(error: ValidationError) -> Iterator[ValidationError]:
    """Replace a failed choice by what is wrong with the alternative the author most likely meant."""
    if error.validator != "oneOf" or not error.context:
        yield error
        return
    alternatives: dict[int, list[ValidationError]] = {}
    for inner in error.context:
        alternatives.setdefault(int(inner.schema_path[0]), []).append(inner)
    fitting = [group for group in alternatives.values() if not any(inner.validator == "type" for inner in group)]
    yield from fitting[0] if fitting else [error]


def _problems(document: Document, error: ValidationError) -> Iterator[Problem]:
    path = tuple(error.absolute_path)
    instance = cast(Any, error.instance)
    rules = cast(Any, error.schema)
    if error.validator == "additionalProperties":
        known = sorted(rules["properties"])
        for key in sorted(set(instance) - set(known)):
            what = f"unknown key {key!r}; allowed are {', '.join(known)}.{hint(key, known)}"
            yield Problem(_where(document, (*path, key)), what)
        return
    if error.validator == "required":
        # jsonschema reports each missing key on its own; the message names it first.
        key = next(key for key in rules["required"] if error.message.startswith(repr(key)))
        what = f"key {key!r} is missing; it must be {_described(rules['properties'][key])}"
        yield Problem(_where(document, path), what)
        return
    yield Problem(_where(document, path), f"must be {_allowed(error)}, but is {_shown(instance)} instead")


def _described(rules: dict[str, Any]) -> str:
    if "enum" in rules:
        return f"one of {_shown(rules['enum'])}"
    return f"of type {_either(_types(rules['oneOf']) if 'oneOf' in rules else rules.get('type', 'string'))}"


def _where(document: Document, path: tuple[str | int, ...]) -> str:
    dotted = ".".join(str(part) for part in path)
    return f"{document.place(path)}" + (f" ({dotted})" if dotted else "")


def _allowed(error: ValidationError) -> str:
    rules: dict[str, str] = {
        "type": f"of type {_either(error.validator_value)}",
        "enum": f"one of {_shown(error.validator_value)}",
        "minimum": f"{error.validator_value} or more",
        "maximum": f"{error.validator_value} or less",
        "exclusiveMinimum": f"greater than {error.validator_value}",
        "minLength": f"at least {error.validator_value} character long",
        "minItems": f"a list of at least {error.validator_value}",
        "pattern": "made of letters, digits, '_', '-' and '.'",
    }
    if error.validator == "oneOf":
        return f"of type {_either(_types(error.validator_value))}"
    return rules.get(str(error.validator), error.message)


def _either(types: Any) -> str:
    return types if isinstance(types, str) else " or ".join(map(str, types)) if isinstance(types, list) else str(types)


def _types(alternatives: Any) -> list[str]:
    # What is only referred to is a name.
    return [str(one.get("type", "string")) for one in alternatives if isinstance(one, dict)]


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
