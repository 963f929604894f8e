"""What stands against spreading modules over processes is told before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import InvalidExperiment
from tests.support.experiments import write_experiment
from tests.support.running import run_inside

FSDP = {"parallelism": "fsdp"}


def refusal(home: Path, module: str = "", **training: Any) -> str:
    files: dict[str, str | None] = {"pymodules/modules/trunk.py": f"from torch import nn\n{module}"} if module else {}
    write_experiment(home, files=files, training=training)
    with pytest.raises(InvalidExperiment) as raised:
        run_inside(home)
    assert not (home / "experiment_results").exists()
    return str(raised.value)


def test_patterns_that_fit_nothing_are_told_with_the_names_there_are(tmp_path: Path) -> None:
    """A typing error in a pattern is no silent choice to shard nothing, with any parallelism."""
    module = "module = nn.Sequential(nn.Linear(6, 8), nn.ReLU())\nsettings = {'shard': ['0', 'blocks.*']}\n"
    told = refusal(tmp_path, module)
    assert "modules/trunk.py: settings['shard'] must name submodules, but 'blocks.*' fits none; there are 0, 1" in told


def test_patterns_must_be_a_list_of_names(tmp_path: Path) -> None:
    """A single name is told to be put into a list."""
    told = refusal(tmp_path, "module = nn.Linear(6, 8)\nsettings = {'shard': 'blocks'}\n")
    assert "settings['shard'] must be a list of names of submodules" in told


def test_modules_that_cannot_be_gathered_are_told(tmp_path: Path) -> None:
    """A container is never called, and a scalar cannot be cut."""
    module = """
class Trunk(nn.ModuleDict):
    def __init__(self):
        super().__init__({"a": nn.Linear(6, 8)})
        self.scale = nn.Parameter(__import__("torch").ones(()))

module = Trunk()
settings = {}
"""
    told = refusal(tmp_path, module, **FSDP)
    assert "module only holds others" in told
    assert "needs parameters with a dimension, but scale has none" in told


@pytest.mark.parametrize(("key", "value"), [("gradient_reduction", "exact"), ("sync_batchnorm", True)])
def test_settings_that_exclude_sharding_are_told(tmp_path: Path, key: str, value: Any) -> None:
    """What FSDP cannot do is refused with the way out."""
    told = refusal(tmp_path, **FSDP, **{key: value})
    assert f'training.json (parallelism): "fsdp" does not go together with {key}' in told
