"""What stands against spreading modules over processes is told before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.arguments import parse_arguments
from pipeline.commands.check import check_before_run
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


TIED_BLOCKS = """
module = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 8))
module[2].weight = module[0].weight
settings = {"shard": ["0"]}
"""


def test_weights_tied_between_units_of_a_module_are_refused(tmp_path: Path) -> None:
    """Each unit would have shards of its own, so the pattern that makes the second unit is named as the way out."""
    told = refusal(tmp_path, TIED_BLOCKS, **FSDP)
    assert "fsdp keeps weights tied inside one unit only, but 0.weight in unit 0 of modules/trunk.py" in told
    assert "and 2.weight in unit module of modules/trunk.py are the same" in told
    assert "fix: take the pattern of the unit out of settings['shard'], or use parallelism: ddp" in told


@pytest.mark.parametrize(
    ("file", "settings", "place"),
    [
        ("head_a", "{}", "weight in unit module of modules/head_a.py"),
        ("stem", "{'frozen': True}", "0.weight in the frozen modules/stem.py"),
    ],
)
def test_weights_tied_between_modules_are_refused(tmp_path: Path, file: str, settings: str, place: str) -> None:
    """A module whose weights are also in another module is told with both files, and check finds it too."""
    inner = "nn.Sequential(nn.Linear(6, 6))" if file == "stem" else "nn.Linear(6, 6)"
    weight = "module[0].weight" if file == "stem" else "module.weight"
    files: dict[str, str | None] = {
        f"pymodules/modules/{file}.py": f"from torch import nn\nmodule = {inner}\nsettings = {settings}\n",
        "pymodules/modules/trunk.py": f"from torch import nn\nfrom . import {file}\nmodule = nn.Linear(6, 6)\n"
        f"module.weight = {file}.{weight}\nsettings = {{}}\n",
    }
    write_experiment(tmp_path, files=files, training=FSDP)
    with pytest.raises(InvalidExperiment) as raised:
        run_inside(tmp_path)
    told = str(raised.value)
    assert f"but {place} and weight in unit module of modules/trunk.py are the same" in told
    assert "fix: tie weights inside one module, or use parallelism: ddp" in told
    with pytest.raises(InvalidExperiment) as raised:
        check_before_run(parse_arguments(["tiny", "--data-home", str(tmp_path)]))
    assert str(raised.value) == told


TIED_IN_ONE_UNIT = "from torch import nn\n" + TIED_BLOCKS.replace('["0"]', '["3"]')
SHARED_SUBMODULE = """
from torch import nn

module = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 8))
module.again = module[0]
settings = {"shard": ["0"]}
"""
FROZEN_TWICE = "from torch import nn\nfrom .stem import module\nsettings = {'frozen': True}\n"


@pytest.mark.parametrize(
    "files",
    [
        {"pymodules/modules/trunk.py": TIED_IN_ONE_UNIT},
        {"pymodules/modules/trunk.py": SHARED_SUBMODULE},
        {"pymodules/modules/stem_again.py": FROZEN_TWICE},
    ],
    ids=["two names in one unit", "a submodule with two names", "frozen modules that stay whole"],
)
def test_weights_that_stay_tied_are_allowed(tmp_path: Path, files: dict[str, str | None]) -> None:
    """What lies in one unit stays tied, and so does what is not sharded at all."""
    write_experiment(tmp_path, files=files, training=FSDP)
    check_before_run(parse_arguments(["tiny", "--data-home", str(tmp_path)]))


@pytest.mark.parametrize(("key", "value"), [("gradient_reduction", "exact"), ("sync_batchnorm", True)])
def test_settings_that_exclude_sharding_are_told(tmp_path: Path, key: str, value: Any) -> None:
    """What FSDP cannot do is refused with the way out."""
    told = refusal(tmp_path, **FSDP, **{key: value})
    assert f'training.json (parallelism): "fsdp" does not go together with {key}' in told
