"""`export`: modules of experiments and of foreign files in one file that can be used."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from pipeline.__main__ import main
from pipeline.serialization.torch_files import load_tensors, load_weights
from tests.support.experiments import tree, write_experiment
from tests.support.running import run_inside

Call = Callable[..., str]
MODULES = ["stem", "head_a", "head_b", "trunk"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data home with two experiments of the same modules and other weights."""
    home = tmp_path_factory.mktemp("trained")
    for name, seed in (("left", 1), ("right", 2)):
        write_experiment(home, name, training={"seed": seed})
        run_inside(home, "--stop-after-epoch", "1", name=name)
    return home


@pytest.fixture
def call(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Return a function that exports from inside a folder of its own; the data home must stay as it was."""
    monkeypatch.chdir(tmp_path)

    def export(*words: str, code: int = 0, home: Path = trained) -> str:
        before = tree(home)
        assert main(["export", *words, "--data-home", str(home)]) == code
        assert tree(home) == before
        said = capsys.readouterr()
        return said.err if code else said.out

    return export


def pool(home: Path, name: str, pool: str, module: str) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = load_tensors(
        home / f"experiment_results/{name}/data/module_ckps/{pool}/{module}.pt"
    )
    return weights


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return list(left) == list(right) and all(torch.equal(left[key], right[key]) for key in left)


def test_all_modules_of_an_experiment_come_with_the_frozen_ones(trained: Path, call: Call) -> None:
    """The best pool and the frozen modules beside it, as state dicts by module."""
    said = call("left", "--out", "x.pt")
    found = load_tensors(Path("x.pt"))
    assert list(found) == MODULES
    assert same(found["stem"], pool(trained, "left", "frzn", "stem"))
    assert same(found["trunk"], pool(trained, "left", "best", "trunk"))
    assert "wrote x.pt: 4 modules, 166 parameters, " in said
    assert "  stem    67 parameters  from left:frzn (commit 1)\n" in said
    assert max(map(len, said.splitlines())) <= 80
    assert os.listdir() == ["x.pt"]


def test_parts_of_several_experiments_are_put_together(trained: Path, call: Call) -> None:
    """Pools and modules are chosen by name; a safetensors file says where each came from."""
    call("left:init:trunk", "right:last:head_a", "--out", "x.safetensors")
    found = load_weights(Path("x.safetensors"))
    trunk = {key.removeprefix("trunk."): one for key, one in found.items() if key.startswith("trunk.")}
    expected = pool(trained, "left", "init", "trunk")
    assert trunk.keys() == expected.keys()
    assert all(torch.equal(trunk[key], expected[key]) for key in trunk)
    with safe_open("x.safetensors", framework="pt") as file:
        sources = json.loads(file.metadata()["modules"])
    assert sources["trunk"].startswith("left:init epoch 0, commit ")
    assert sources["head_a"].startswith("right:last epoch 1, commit ")


def test_trained_modules_alone_can_be_asked_for(call: Call) -> None:
    """Frozen modules stay out if they are not wanted."""
    call("left", "--trained-only", "--out", "x.pt")
    assert list(load_tensors(Path("x.pt"))) == ["head_a", "head_b", "trunk"]


def test_overlaps_are_refused_unless_renamed(call: Call) -> None:
    """The same name from two sources is told with the option that keeps them apart."""
    said = call("left:best:trunk", "right:best:trunk", "--out", "x.pt", code=2)
    assert "left:best:trunk and right:best:trunk are both 'trunk'" in said
    assert "--rename right:best:trunk=NEW" in said
    assert not Path("x.pt").exists()
    said = call("left:best:trunk", "right:best:trunk", "--rename", "right:trunk=other", "--out", "x.pt")
    assert "  other  81 parameters  from right:best:trunk (epoch" in said
    assert list(load_tensors(Path("x.pt"))) == ["trunk", "other"]


def test_frozen_modules_of_two_pools_are_the_same(call: Call) -> None:
    """Two pools of one experiment overlap in what they trained only."""
    renames = [f"--rename=left:last:{name}=last_{name}" for name in MODULES[1:]]
    call("left:init", "left:last", *renames, "--out", "x.pt")
    assert list(load_tensors(Path("x.pt"))) == [*MODULES, "last_head_a", "last_head_b", "last_trunk"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("lfet",), 2, "there are left, right. Did you mean 'left'?"),
        (("left:bets",), 2, "has no pool 'bets'; there are best, epoch_1, init, last. Did you mean 'best'?"),
        (("left:best:trnk",), 2, "no module 'trnk'; there are stem, head_a, head_b, trunk. Did you mean 'trunk'?"),
        (("left:best:trunk:x",), 2, "A source must be EXP, EXP:POOL, EXP:POOL:MODULE or a file"),
        (("left:",), 2, "A source must be EXP"),
        (("../left",), 2, "The experiment name must be"),
        (("left", "--rename", "trnk=x"), 2, "--rename 'trnk' means no module"),
        (("left", "--rename", "trunk=a.b"), 2, "A module's name must be letters"),
        (("left", "right", "--rename", "trunk=x"), 2, "must mean one module, but means left:best:trunk, right:best"),
        (("left", "--strip-prefix", "module."), 2, "clean files, but all sources are experiments"),
        (("nowhere.pt",), 1, "nowhere.pt must be a file of tensors"),
    ],
)
def test_bad_input_is_told(call: Call, words: tuple[str, ...], code: int, said: str) -> None:
    """What cannot be done is refused in one message, and no file is written."""
    assert said in call(*words, "--out", "x.pt", code=code)
    assert os.listdir() == []


@pytest.mark.parametrize("word", ["x", "=x", ""])
def test_bad_pair_is_told(call: Call, capsys: pytest.CaptureFixture[str], word: str) -> None:
    """Renaming needs an old and a new name."""
    with pytest.raises(SystemExit):
        main(["export", "left", f"--rename={word}", "--out", "x.pt"])
    assert "must be MODULE=NEW" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "code"), [("x.bin", 2), ("nowhere/x.pt", 2), ("taken.pt", 3), ("folder.pt", 2)])
def test_place_of_the_file_is_checked_first(call: Call, name: str, code: int) -> None:
    """An unknown suffix, a missing folder and a file that exists are refused; --force replaces a file."""
    Path("taken.pt").write_text("mine")
    Path("folder.pt").mkdir()
    call("left", "--out", name, code=code)
    assert Path("taken.pt").read_text() == "mine"
    call("left", "--out", "taken.pt", "--force")
    assert sorted(os.listdir()) == ["folder.pt", "taken.pt"]


def test_damaged_pool_is_refused_by_name(trained: Path, tmp_path: Path, call: Call) -> None:
    """Nothing is exported from a file whose digest does not hold; intact pools are named."""
    home = shutil.copytree(trained, tmp_path / "home")
    for file in (home / "experiment_results/left/generations").glob("*/module_ckps/last/trunk.pt"):
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    said = call("left:last", "--out", "x.pt", code=1, home=home)
    assert "module_ckps/last/trunk.pt is damaged: its content is not what was committed" in said
    assert "Intact pools of 'left': frzn, init" in said


FOREIGN = {"module.a.weight": torch.ones(2, 3), "module.a.bias": torch.zeros(2)}


@pytest.mark.parametrize(
    ("content", "dropped"),
    [
        (FOREIGN, ""),
        ({"state_dict": FOREIGN, "epoch": 3}, "epoch"),
        ({"model": FOREIGN, "optimizer": {"state": {0: {"m": torch.ones(1)}}}, "epoch": 3}, "optimizer, epoch"),
        ({**FOREIGN, "version": 7}, "version"),
        (nn.ModuleDict({"module": nn.ModuleDict({"a": nn.Linear(3, 2)})}).state_dict(), ""),
    ],
)
def test_foreign_file_is_cleaned(call: Call, content: Any, dropped: str) -> None:
    """Wrappers are unwrapped, prefixes cut off, keys renamed, and what is no tensor is dropped and named."""
    torch.save(content, "net.v1.pth")
    said = call("net.v1.pth", "--strip-prefix", "module.", "--key-map", "a.=layer.", "--out", "x.pt")
    found = load_tensors(Path("x.pt"))
    assert list(found) == ["net_v1"]
    assert list(found["net_v1"]) == ["layer.weight", "layer.bias"]
    assert (f"dropped: {dropped}\n" in said) == bool(dropped)


def test_view_of_a_large_tensor_is_cut_off(call: Call) -> None:
    """A file holds what its tensors show and not the storage behind them."""
    torch.save({"w": torch.zeros(1_000_000)[:2]}, "net.pt")
    call("net.pt", "--out", "x.pt")
    assert Path("x.pt").stat().st_size < 10_000


def test_file_of_several_modules_is_taken_apart(call: Call) -> None:
    """Of an exported file, all modules or one come along, whatever its kind."""
    call("left", "--out", "a.pt")
    call("left", "--out", "a.safetensors")
    call("a.pt", "--out", "b.pt")
    assert list(load_tensors(Path("b.pt"))) == MODULES
    call("a.pt:trunk", "a.safetensors:head_a", "--out", "c.pt")
    found = load_tensors(Path("c.pt"))
    assert list(found) == ["trunk", "head_a"]
    assert set(found["head_a"]) == {"weight", "bias"}


@pytest.mark.parametrize(
    ("content", "words", "said"),
    [
        (torch.ones(3), (), "must hold a dict of tensors, but holds Tensor"),
        ({"epoch": 3}, (), "must hold tensors, but has none among epoch"),
        (FOREIGN, ("--strip-prefix", "model."), "fits no key of net.pt; the first is 'module.a.weight'"),
        ({"a": torch.ones(1), "x.a": torch.ones(1)}, ("--strip-prefix", "x."), "two of them become 'a'"),
        ({"x": nn.Linear(1, 1)}, (), "would run code"),
        ({"x": torch.eye(2).to_sparse()}, (), "these are sparse or quantised: x"),
    ],
)
def test_foreign_file_that_cannot_be_cleaned_is_told(call: Call, content: Any, words: Any, said: str) -> None:
    """What is no file of weights, or would be garbled, is refused with its name."""
    torch.save(content, "net.pt")
    code = 2 if "--strip-prefix" in words and "fits" in said else 1
    assert said in call("net.pt", *words, "--out", "x.pt", code=code)
    assert not Path("x.pt").exists()


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_failed_write_leaves_nothing(call: Call, name: str) -> None:
    """Where there is no room, the failure is told and neither a half file nor a scratch file stays."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        said = call("left", "--out", name, code=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"{name} could not be written: " in said
    assert os.listdir() == []


def test_old_format_of_torch_is_refused_with_a_remedy(call: Call) -> None:
    """A file from before torch 1.6 has to be saved again."""
    torch.save(FOREIGN, "net.pth", _use_new_zipfile_serialization=False)
    assert "save it again with torch.save" in call("net.pth", "--out", "x.pt", code=1)


def test_plain_values_do_not_fit_safetensors(call: Call, trained: Path, tmp_path: Path) -> None:
    """A module that saves more than tensors is refused there, and kept whole in a .pt file."""
    text = """
        from torch import nn


        class Head(nn.Linear):
            def get_extra_state(self):
                return {"version": 3}

            def set_extra_state(self, state):
                pass


        module = Head(8, 1)
        settings = {}
    """
    home = tmp_path / "home"
    write_experiment(home, files={"pymodules/modules/head_a.py": text})
    run_inside(home, "--stop-after-epoch", "0")
    assert "these are not: head_a._extra_state" in call("tiny", "--out", "x.safetensors", code=2, home=home)
    call("tiny", "--out", "x.pt", home=home)
    assert load_tensors(Path("x.pt"))["head_a"]["_extra_state"] == {"version": 3}


def test_missing_package_is_told_before_the_work(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without safetensors the pip line is given, for writing and for reading."""
    call("left", "--out", "a.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    assert "pip install 'training-pipeline[safetensors]'" in call("left", "--out", "x.safetensors", code=2)
    assert "pip install 'training-pipeline[safetensors]'" in call("a.safetensors", "--out", "x.pt", code=2)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_branches_trained_apart_are_used_frozen_in_a_third_experiment(call: Call, tmp_path: Path, suffix: str) -> None:
    """A merged file in module_ckps/ fills the frozen modules of another experiment by name."""
    home = tmp_path / "home"
    (home / "module_ckps").mkdir(parents=True)
    target = home / f"module_ckps/both{suffix}"
    call("left:best:trunk", "right:best:trunk", "--rename=right:trunk=right_trunk", "--out", str(target))
    layers = "nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))"
    files: dict[str, str | None] = {
        f"pymodules/modules/{name}.py": f"from torch import nn\n\nmodule = {layers}\nsettings = "
        + repr({"frozen": True, "load_weights_from_ckp": {"ckp_name": target.name, "module_name": name}})
        for name in ("trunk", "right_trunk")
    }
    write_experiment(home, files={**files, "pymodules/optim_sched/trunk.py": None})
    run_inside(home, "--stop-after-epoch", "1")
    for name in ("trunk", "right_trunk"):
        used = pool(home, "tiny", "frzn", name)
        exported = load_weights(target)
        for key, value in used.items():
            assert torch.equal(value, exported[name][key] if suffix == ".pt" else exported[f"{name}.{key}"])


def test_help_fits_any_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """At 80 and at 120 columns no line of the help of either verb is longer, examples included."""
    for verb in ("export", "evaluate"):
        for columns in (80, 120):
            monkeypatch.setenv("COLUMNS", str(columns))
            with pytest.raises(SystemExit):
                main([verb, "--help"])
            assert max(map(len, capsys.readouterr().out.splitlines())) <= columns
