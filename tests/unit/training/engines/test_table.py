"""The table of engines has what the settings can ask for."""

from __future__ import annotations

from pathlib import Path

from pipeline.experiment.settings.settings import FSDP
from pipeline.experiment.settings.validation import contradiction_problems, schema
from pipeline.training.engines.table import ENGINES


def test_every_engine_of_the_schema_is_in_the_table() -> None:
    """Each way of reducing gradients that training.json allows has an engine, and sharded modules have theirs."""
    properties = schema("training")["properties"]
    assert {*properties["gradient_reduction"]["enum"], FSDP} == set(ENGINES)


def test_no_engine_is_passed_over_silently() -> None:
    """Sharded modules have an engine of their own, so every other that one can ask for is refused with them."""
    keys = schema("training")["properties"]["gradient_reduction"]
    for name in set(keys["enum"]) - {keys["default"]}:
        contents = {"data_loading": {}, "training": {"parallelism": FSDP, "gradient_reduction": name}}
        assert list(contradiction_problems(contents, Path("settings"))), name
