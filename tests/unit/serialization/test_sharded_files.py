"""Folders of shards: what is written is read back, by us and by torch, and what means harm is refused."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from pipeline.distributed.processes import Processes
from pipeline.errors import PipelineError, UnreadableFile
from pipeline.serialization import dcp_writer
from pipeline.serialization.dcp_writer import save_shards
from pipeline.serialization.shard_index import parse_index
from pipeline.serialization.sharded_files import INDEX, VALUES, load_shards, num_bytes
from pipeline.store.compare import first_difference
from tests.support.hostile import Call, Stored, Tensor, save_hostile

STATE = {
    "weight": torch.arange(12.0).view(3, 4),
    "scale": torch.tensor(2.5, dtype=torch.bfloat16),
    "none": torch.empty(0, 4),
    "_extra_state": {"version": 3},
    "state": {0: {"step": torch.tensor(7), "moment": torch.ones(2)}, 1: {"moment": None}},
    "param_groups": [{"lr": 0.1, "params": [0, 1]}],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A state as one process writes it."""
    save_shards({tmp_path / "shards": STATE}, Processes())
    return tmp_path / "shards"


def test_state_comes_back_as_it_was(folder: Path, tmp_path: Path) -> None:
    """Tensors, plain values, nested dicts and their keys are what was saved."""
    save_shards({tmp_path / "again/shards": load_shards(folder)}, Processes())
    found = load_shards(folder)
    assert torch.equal(found["state"][0]["moment"], torch.ones(2))
    assert (found["_extra_state"], found["param_groups"], found["state"][1]) == (
        {"version": 3},
        STATE["param_groups"],
        {"moment": None},
    )
    assert found["scale"].dtype == torch.bfloat16
    folder.rename(tmp_path / "again/first")
    assert first_difference(tmp_path / "again/first", tmp_path / "again/shards") is None
    assert num_bytes(STATE) == 12 * 4 + 2 + 8 + 2 * 4


def test_torch_reads_the_same_folder(folder: Path) -> None:
    """A folder of shards is a checkpoint of torch's own."""
    into = {"weight": torch.zeros(3, 4), "state.0.moment": torch.zeros(2)}
    load(into, storage_reader=FileSystemReader(folder), no_dist=True)
    assert torch.equal(into["weight"], STATE["weight"])  # type: ignore[arg-type]


def test_module_keeps_the_versions_of_its_layers(tmp_path: Path) -> None:
    """What hangs on a state dict besides its items is kept too."""
    state = nn.BatchNorm1d(3).state_dict()
    save_shards({tmp_path / "shards": state}, Processes())
    assert load_shards(tmp_path / "shards")._metadata == state._metadata  # type: ignore[attr-defined]


def changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "format": (lambda index: index.update(format=9), "must have format 1"),
    "no list": (lambda index: index.update(tensors=3), "must have format 1"),
    "absurd": (lambda index: index["tensors"][0].update(shape=[2**40, 4]), "do not make up its shape"),
    "absurd piece": (
        lambda index: index["tensors"][0].update(shape=[2**40], pieces=[[[0], [2**40], "__0_0.distcp", 0, 9]]),
        "claims more than its 9 bytes",
    ),
    "outside": (lambda index: index["tensors"][0]["pieces"][0].__setitem__(0, [1, 0]), "lies outside of it"),
    "negative": (lambda index: index["tensors"][0]["pieces"][0].__setitem__(3, -1), "without a proper shape"),
    "elsewhere": (lambda index: index["tensors"][0]["pieces"][0].__setitem__(2, "../x"), "which is not there"),
    "cut off": (lambda index: index["tensors"][0]["pieces"][0].__setitem__(3, 10**9), "is cut off"),
    "no tensor": (lambda index: index["tensors"][0].update(dtype="Tensor"), "is not a tensor"),
    "twice": (lambda index: index["tensors"].append(index["tensors"][0]), "names a tensor twice"),
    "again and again": (
        lambda index: index["tensors"].extend({**index["tensors"][0], "path": [f"{n}"]} for n in range(1000)),
        "its index claims",
    ),
    "another dtype": (lambda index: index["tensors"][0].update(dtype="int32"), "is not what the index says"),
    "nothing": (lambda index: index["tensors"][0].clear(), "its index is damaged"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_index_that_claims_what_is_not_there_is_refused(folder: Path, name: str) -> None:
    """Shapes, places and files of an index are compared with the folder before anything is allocated."""
    change, message = CHANGES[name]
    changed(folder, change)
    with pytest.raises(UnreadableFile, match=message):
        load_shards(folder)


def test_folder_that_lacks_a_piece_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rank zero does not see what another machine has written, nothing is committed."""
    monkeypatch.setattr(dcp_writer, "file_sizes", lambda folder: {INDEX: 1})
    with pytest.raises(PipelineError, match=r"'__0_0.distcp', which is not there\. The last commit is intact"):
        save_shards({tmp_path / "shards": STATE}, Processes())


@given(st.recursive(st.none() | st.integers() | st.text(max_size=8), lambda one: st.lists(one, max_size=5)))
def test_any_index_is_refused_or_makes_sense(value: Any) -> None:
    """Nothing that may stand in an index makes more of it than a refusal."""
    entry = {"path": ["a"], "dtype": "float32", "shape": [2], "pieces": [[[0], [2], "f", 0, 8]]}
    for key in entry:
        content = json.dumps({"format": 1, "tensors": [{**entry, key: value}]}).encode()
        with contextlib.suppress(ValueError):
            assert len(parse_index(content, {"f": 8})) == 1


@pytest.mark.parametrize("value", [Call(os.mkdir, ("canary",)), Tensor(Stored(4), (2**45,), (0,))])
@pytest.mark.parametrize("name", [VALUES, "__0_0.distcp"])
def test_hostile_files_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    """No file of the folder runs code or fills the memory."""
    monkeypatch.chdir(folder.parent)
    save_hostile(folder / "hostile.pt", value)
    (folder / "hostile.pt").replace(folder / name)
    length = (folder / name).stat().st_size
    changed(folder, lambda index: index["tensors"][0]["pieces"][0].__setitem__(slice(3, 5), [0, length]))
    changed(folder, lambda index: index.update(tensors=index["tensors"][:1]))
    with pytest.raises(UnreadableFile):
        load_shards(folder)
    assert not Path("canary").exists()


def test_pickle_of_torch_is_never_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The metadata of torch could run any code, and is for torch alone."""
    monkeypatch.chdir(folder.parent)
    (folder / ".metadata").write_bytes(pickle.dumps(Call(os.mkdir, ("canary",))))
    assert torch.equal(load_shards(folder)["weight"], STATE["weight"])  # type: ignore[arg-type]
    assert not Path("canary").exists()
