"""Weights to start from, named on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.experiments import write_experiment
from tests.support.running import run_inside, run_process
from tests.support.verbs import call

POOLS = "experiment_results/{}/data/module_ckps"
TRAINED = ("head_a", "head_b", "trunk")


@pytest.fixture
def exported(begun: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A data home with a trained experiment, its weights in one file, and a second experiment of the same modules."""
    assert call(begun, "export", "tiny:last", "--out", str(begun / "all.pt")) == 0
    write_experiment(begun, "second", training={"seed": 9})
    capsys.readouterr()
    return begun


def weights(home: Path, name: str, pool: str, module: str) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = torch.load(home / POOLS.format(name) / pool / f"{module}.pt", weights_only=True)
    return loaded


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_all_modules_start_from_one_file(exported: Path) -> None:
    """What export has written goes in again; the start is frozen, and a repeated command continues."""
    run_inside(exported, "--init-from", str(exported / "all.pt"), "--stop-after-epoch", "0", name="second")
    for module in TRAINED:
        assert equal(weights(exported, "second", "init", module), weights(exported, "tiny", "last", module)), module
    frozen = json.loads((exported / "experiment_results/second/settings/training.json").read_text())
    assert frozen["init_from"] == str(exported / "all.pt")
    run_inside(exported, "--auto", "--init-from", str(exported / "all.pt"), "--stop-after-epoch", "1", name="second")


def test_single_module_starts_from_a_file(exported: Path) -> None:
    """A file of one module, or one with several of which the name decides; the others start by the seed."""
    trunk = exported / POOLS.format("tiny") / "last/trunk.pt"
    for file in (trunk, exported / "all.pt"):
        change = f"modules.trunk.load_weights_from_ckp={file}"
        run_inside(exported, "--reset", "--set", change, "--stop-after-epoch", "0", name="second")
        assert equal(weights(exported, "second", "init", "trunk"), weights(exported, "tiny", "last", "trunk"))
        assert not equal(weights(exported, "second", "init", "head_a"), weights(exported, "tiny", "last", "head_a"))


def test_source_of_a_modules_own_file_comes_first(exported: Path) -> None:
    """The file for all does not overrule what a module says of itself."""
    folder = exported / "module_ckps"
    folder.mkdir()
    torch.save({"weight": torch.ones(1, 8), "bias": torch.ones(1)}, folder / "ones.pt")
    own = (
        "from torch import nn\n\nmodule = nn.Linear(8, 1)\nsettings = {'load_weights_from_ckp': {'ckp_name': 'ones'}}\n"
    )
    write_experiment(exported, "second", files={"pymodules/modules/head_a.py": own})
    words = ["--init-from", str(exported / "all.pt"), "--stop-after-epoch", "0"]
    done = run_process(exported, *words, name="second", nproc=2)
    assert done.returncode == 0, done.stderr
    assert weights(exported, "second", "init", "head_a")["weight"].eq(1).all()
    assert equal(weights(exported, "second", "init", "trunk"), weights(exported, "tiny", "last", "trunk"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--init-from", "nosuch.pt"], "weights must come from a file, but"),
        (["--set", "modules.trunk.frozen=true"], "of a module only load_weights_from_ckp can be set"),
        (["--set", "modules.trunc.load_weights_from_ckp=all.pt"], "module_weights has 'trunc', but the modules are"),
        (["--resume", "--init-from", "all.pt"], "--init-from works only when an experiment starts"),
    ],
)
def test_wrong_source_is_a_sentence(exported: Path, words: list[str], said: str) -> None:
    """Nothing is written for a file, a module or a moment that does not fit."""
    done = run_process(exported, *words, name="second")
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert not (exported / "experiment_results/second").exists()


def test_module_that_the_file_lacks_is_named(exported: Path) -> None:
    """A start from half of the weights would be a silent mistake."""
    torch.save({"trunk": weights(exported, "tiny", "last", "trunk"), "x": {"y": torch.ones(1)}}, exported / "half.pt")
    done = run_process(exported, "--init-from", str(exported / "half.pt"), name="second")
    assert done.returncode == 2
    assert "half.pt has no module 'head_a'; there are trunk, x." in done.stderr
