"""The table of engines has all that depends on how gradients are added."""

from __future__ import annotations

import pkgutil
from pathlib import Path

from pipeline.experiment.settings.engines import ENGINES, keys_of_engines
from pipeline.experiment.settings.validation import contradiction_problems, schema
from pipeline.training.engines.base import GradientEngine


def test_each_row_names_an_engine_and_is_a_value_of_its_key() -> None:
    """The schema takes the names of engines from the table, and each row leads to a class."""
    properties = schema("training")["properties"]
    for name, key in keys_of_engines().items():
        assert name in properties[key]["enum"]
        assert issubclass(pkgutil.resolve_name(ENGINES[name].implementation), GradientEngine)


def test_engine_that_has_no_shards_does_not_go_together_with_them() -> None:
    """Sharded modules have an engine of their own, so every other that one can ask for is refused with them."""
    keys = schema("training")["properties"]["gradient_reduction"]
    for name in set(keys["enum"]) - {keys["default"]}:
        contents = {"data_loading": {}, "training": {"parallelism": "fsdp", "gradient_reduction": name}}
        assert list(contradiction_problems(contents, Path("settings"))), name
