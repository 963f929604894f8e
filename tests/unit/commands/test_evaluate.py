"""`evaluate`: exact values from committed weights, with nothing written but the file that was asked for."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.__main__ import main
from pipeline.errors import PipelineError
from pipeline.evaluation.result import merge, read_shard
from pipeline.serialization.npz_files import load_arrays
from pipeline.serialization.torch_files import load_tensors
from pipeline.store.compare import read_any
from tests.support.experiments import FILES, tree, write_experiment
from tests.support.running import run_inside

# Test points only in dataset a; dataset b has none.
_POINTS = FILES["pymodules/utils/points.py"].replace(
    "idxs = range(len(self.targets))",
    'if split == "test":\n                    return [3, 1, 2] if len(self.targets) == 50 else []\n'
    "                idxs = range(len(self.targets))",
)
_PREDICT = FILES["pymodules/module_transforms/a.py"] + (
    """
            def predict(self, batch, modules):
                outputs = modules[self.head](modules["trunk"](modules["stem"](batch["x"])))
                return {"output": outputs, "half": outputs.bfloat16()[:, 0], "input": batch["x"].numpy()}
    """
)
EXPERIMENT: dict[str, str | None] = {
    "pymodules/utils/points.py": _POINTS,
    "pymodules/module_transforms/a.py": _PREDICT,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data home with an experiment that has finished and can predict."""
    home = tmp_path_factory.mktemp("finished")
    write_experiment(home, files=EXPERIMENT)
    run_inside(home)
    return home


@pytest.fixture
def spoiled(finished: Path, tmp_path: Path) -> Path:
    """A copy of it that may be changed."""
    return shutil.copytree(finished, tmp_path / "home")


@pytest.fixture
def call(finished: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that evaluates and returns what was printed; the data home must stay as it was."""

    def evaluate(*words: str, code: int = 0, home: Path = finished) -> str:
        before = tree(home)
        assert main(["evaluate", *words, "--data-home", str(home)]) == code
        assert tree(home) == before
        said = capsys.readouterr()
        return said.err if code else said.out

    return evaluate


def recorded(home: Path, register: str) -> dict[str, list[float]]:
    """Return what the run itself has recorded of a register's validation."""
    found = read_any(home / f"experiment_results/tiny/data/loss_reg_data/val/{register}/epoch_data.npz")
    return {name: column.tolist() for name, column in found.items()}


@pytest.mark.parametrize(("pool", "epoch"), [("best", None), ("init", 0), ("epoch_2", 2), ("last", 3)])
def test_values_are_those_of_the_run(finished: Path, call: Callable[..., str], pool: str, epoch: int | None) -> None:
    """Every pool gives, to the last bit, what the run recorded with the same weights."""
    found = json.loads(call("tiny", "--pool", pool, "--json"))
    assert epoch in (None, found["epoch"])
    for register, value in found["values"].items():
        expected = recorded(finished, register)
        at = expected["epochs"].index(found["epoch"])
        assert [value[name] for name in ("mean", "total", "items")] == [
            expected[name][at] for name in ("means", "totals", "items")
        ]


def test_terminal_shows_one_line_per_register(call: Callable[..., str]) -> None:
    """What was evaluated, then a line for each register that fits a narrow terminal."""
    said = call("tiny").splitlines()
    assert said[0].startswith("tiny, val split, pool best (epoch ")
    assert [line.split()[0] for line in said[1:]] == ["loss_a", "loss_b", "error"]
    assert said[1].endswith("over 10 items")
    assert max(map(len, said)) <= 80


@pytest.mark.parametrize(("split", "items"), [("train", 64), ("val", 16), ("test", 3)])
def test_every_item_of_a_split_counts_once(call: Callable[..., str], split: str, items: int) -> None:
    """The train split too is evaluated whole, in order and without augmentation."""
    found = json.loads(call("tiny", "--split", split, "--json"))
    assert found["values"]["error"]["items"] == items


def test_dataset_without_points_is_named(finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A register that nobody feeds in this split has no items; the dataset that is left out is named."""
    assert main(["evaluate", "tiny", "--split", "test", "--json", "--data-home", str(finished)]) == 0
    said = capfd.readouterr()
    assert json.loads(said.out)["values"]["loss_b"] == {"mean": None, "total": 0.0, "items": 0}
    assert "Dataset b has no points in the test split" in said.err


def test_file_of_every_kind_holds_the_same(call: Callable[..., str], tmp_path: Path) -> None:
    """JSON, npz and pt hold the values and the predictions item by item, with the point of each."""
    for suffix in ("json", "npz", "pt"):
        assert f"wrote {tmp_path / 'x'}.{suffix}" in call("tiny", "--split", "test", "--out", f"{tmp_path}/x.{suffix}")
    texts, arrays, tensors = (
        json.loads((tmp_path / "x.json").read_text()),
        load_arrays(tmp_path / "x.npz"),
        load_tensors(tmp_path / "x.pt"),
    )
    assert texts["predictions"]["a"]["index"] == arrays["predictions/a/index"].tolist() == [3, 1, 2]
    assert np.array_equal(arrays["predictions/a/output"], tensors["predictions"]["a"]["output"])
    assert arrays["predictions/a/output"].shape == (3, 1)
    assert texts["predictions"]["a"]["output"] == arrays["predictions/a/output"].tolist()
    assert tensors["predictions"]["a"]["half"].dtype == torch.float32
    assert texts["values"]["loss_a"]["mean"] == arrays["values/loss_a/mean"] == tensors["values"]["loss_a"]["mean"]
    assert json.loads(arrays["about"].tobytes()) == {name: texts[name] for name in texts if name != "predictions"}


def test_predictions_can_be_left_out(call: Callable[..., str], tmp_path: Path) -> None:
    """Who wants values alone gets a small file."""
    call("tiny", "--out", f"{tmp_path}/x.json", "--no-predictions")
    assert json.loads((tmp_path / "x.json").read_text())["predictions"] == {}


@pytest.mark.parametrize(("split", "count"), [("train", 3), ("val", 7)])
def test_merged_shards_have_the_bits_of_the_whole(
    call: Callable[..., str], tmp_path: Path, split: str, count: int
) -> None:
    """Any number of shards, also more than there are batches, in any order, gives the file of one evaluation."""
    call("tiny", "--split", split, "--out", f"{tmp_path}/whole.pt")
    for index in range(count):
        call("tiny", "--split", split, "--shard", f"{index}/{count}", "--out", f"{tmp_path}/{index}.npz")
    files = [f"{tmp_path}/{index}.npz" for index in reversed(range(count))]
    call("--merge", *files, "--out", f"{tmp_path}/merged.pt")
    whole, merged = (load_tensors(tmp_path / f"{name}.pt") for name in ("whole", "merged"))
    assert merged.pop("world_size") == count * whole.pop("world_size")
    predictions = [one.pop("predictions") for one in (whole, merged)]
    assert merged == whole
    for dataset, columns in predictions[0].items():
        assert all(torch.equal(column, predictions[1][dataset][name]) for name, column in columns.items())


@pytest.fixture
def shards(call: Callable[..., str], tmp_path: Path) -> list[str]:
    """Two shards of one evaluation, and a third of another."""
    words = [("0/2", "best"), ("1/2", "best"), ("1/2", "init")]
    files = [f"{tmp_path}/{number}.npz" for number in range(3)]
    for file, (shard, pool) in zip(files, words, strict=True):
        call("tiny", "--pool", pool, "--shard", shard, "--out", file)
    return files


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ([0], "All 2 shards must be given, but these are missing: 1/2"),
        ([0, 1, 1], "there are several of 1/2"),
        ([0, 2], "All shards must be of one evaluation, but commit is"),
    ],
)
def test_wrong_shards_are_refused(call: Callable[..., str], shards: list[str], chosen: list[int], said: str) -> None:
    """Missing, doubled and foreign shards are named, and nothing is put together."""
    assert said in call("--merge", *(shards[one] for one in chosen), code=2)


def test_what_is_no_shard_is_refused(call: Callable[..., str], shards: list[str], tmp_path: Path) -> None:
    """A whole evaluation, a torn file and one that lies about itself are told."""
    call("tiny", "--out", f"{tmp_path}/whole.npz")
    assert "must be a shard of an evaluation" in call("--merge", f"{tmp_path}/whole.npz", code=2)
    Path(shards[1]).write_bytes(Path(shards[1]).read_bytes()[:-9])
    assert "cut off" in call("--merge", *shards[:2], code=1)
    lie = {"facts": {"batches": 9, "items": {"loss_a": 1}, "predicted": {}}, "shard": [0, 1], "world_size": 1}
    np.savez(tmp_path / "lie.npz", shard=np.frombuffer(json.dumps(lie).encode(), np.uint8), sums=np.zeros((2, 1)))
    assert "do not fit" in call("--merge", f"{tmp_path}/lie.npz", code=1)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every place inside nested dicts and lists, as its container and key."""
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from places(inner)


def test_whatever_a_shard_says_of_itself_is_understood_or_refused(shards: list[str], tmp_path: Path) -> None:
    """Whichever fact is replaced by nonsense, the shard is refused with a message, or the fact does not matter."""
    arrays = load_arrays(Path(shards[0]))
    about = json.loads(arrays.pop("shard").tobytes())
    for container, key in places(about):
        kept = container[key]
        for odd in (None, -1, 10**30, 0.5, "x", [], {}, {"x": {}}, [[0, 1]]):
            container[key] = odd
            np.savez(tmp_path / "odd.npz", shard=np.frombuffer(json.dumps(about).encode(), np.uint8), **arrays)
            with contextlib.suppress(PipelineError):
                shard = read_shard(tmp_path / "odd.npz")
                other = replace(shard, shard=(1, shard.shard[1]), sums=shard.sums[:2], items=shard.items[:2])
                merge([shard, other]).summary()
        container[key] = kept


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("tinny",), 2, "there are tiny. Did you mean 'tiny'?"),
        (("../tiny",), 2, "The experiment name must be"),
        ((), 2, "Say which experiment to evaluate"),
        (("tiny", "--merge", "x.npz"), 2, "Say which experiment to evaluate"),
        (("tiny", "--pool", "bets"), 2, "has no pool 'bets'; there are best, epoch_2, epoch_3, init, last. Did you"),
        (("tiny", "--pool", "frzn"), 2, "must name weights that were trained"),
        (("tiny", "--shard", "0/2"), 2, "--shard needs --out FILE.npz"),
        (("tiny", "--shard", "0/2", "--out", "x.json"), 2, "--out must end in .npz"),
        (("tiny", "--out", "x.txt"), 2, "--out must end in .json, .npz, .pt, but is 'x.txt' instead"),
        (("tiny", "--out", "nowhere/x.json"), 2, "The folder of --out must exist, but nowhere does not."),
        (("--merge", "nowhere.npz"), 1, "No such file"),
    ],
)
def test_bad_input_is_told(call: Callable[..., str], words: tuple[str, ...], code: int, said: str) -> None:
    """What cannot be done is refused before the work, in one message."""
    assert said in call(*words, code=code)


@pytest.mark.parametrize("word", ["2/2", "-1/2", "1", "a/b", "/", "0/0"])
def test_bad_shard_is_told(capsys: pytest.CaptureFixture[str], word: str) -> None:
    """A shard is counted from 0 and below their number."""
    with pytest.raises(SystemExit) as raised:
        main(["evaluate", "tiny", f"--shard={word}"])
    assert raised.value.code == 2
    assert "must be I/N with I from 0 to N - 1" in capsys.readouterr().err


def test_file_is_replaced_only_if_asked(call: Callable[..., str], tmp_path: Path) -> None:
    """A file that exists stays as it is, unless forced; nothing else is left beside it."""
    (tmp_path / "x.json").write_text("mine")
    assert "exists already" in call("tiny", "--out", f"{tmp_path}/x.json", code=3)
    assert (tmp_path / "x.json").read_text() == "mine"
    call("tiny", "--out", f"{tmp_path}/x.json", "--force")
    assert json.loads((tmp_path / "x.json").read_text())["pool"] == "best"
    assert os.listdir(tmp_path) == ["x.json"]


def test_split_without_any_point_names_the_others(tmp_path: Path, call: Callable[..., str]) -> None:
    """If no dataset has points in a split, those that have are named."""
    points = _POINTS.replace("[3, 1, 2]", "[]")
    write_experiment(tmp_path, files={"pymodules/utils/points.py": points})
    run_inside(tmp_path, "--stop-after-epoch", "0")
    said = call("tiny", "--split", "test", home=tmp_path, code=2)
    assert "No dataset has points in the test split; there are points in train, val." in said


def test_dataset_that_raises_is_told_with_its_line(tmp_path: Path, call: Callable[..., str]) -> None:
    """An author's own error in a split that training never asked for is placed in the author's file."""
    points = _POINTS.replace("return [3, 1, 2] if len(self.targets) == 50 else []", 'raise KeyError("no test")')
    write_experiment(tmp_path, files={"pymodules/utils/points.py": points})
    run_inside(tmp_path, "--stop-after-epoch", "0")
    said = call("tiny", "--split", "test", home=tmp_path, code=2)
    assert "utils/points.py:" in said
    assert "KeyError: 'no test'" in said


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("outputs", "must return a dict of tensors, but returned Tensor"),
        ("{'x': outputs.mean()}", "one entry per item, here 4, but returned float32 of shape ()"),
        ("{'x': ['a'] * 4}", "must return numbers for 'x'"),
        ("{'index': outputs}", "plain words other than index and position, but has 'index'"),
        ("{'a/b': outputs}", "but has 'a/b'"),
        ("{'x': outputs if batch['idx'][0] else outputs.double()}", "the same names, types and shapes"),
    ],
)
def test_predictions_must_follow_the_contract(
    spoiled: Path, tmp_path: Path, call: Callable[..., str], returned: str, said: str
) -> None:
    """What predict returns is checked, and the file that breaks the contract is named."""
    file = spoiled / "experiment_results/tiny/pymodules/module_transforms/a.py"
    head, _, _ = file.read_text().rpartition("return {")
    file.write_text(f"{head}return {returned}\n")
    words = ("tiny", "--out", f"{tmp_path}/x.pt", "--accept-edited-copy")
    told = call(*words, home=spoiled, code=1)
    assert said in told
    assert "module_transforms/a.py" in told
    assert not (tmp_path / "x.pt").exists()


def test_predict_with_other_arguments_is_told(spoiled: Path, tmp_path: Path, call: Callable[..., str]) -> None:
    """A method of that name that is something else is no reason to crash in the middle."""
    file = spoiled / "experiment_results/tiny/pymodules/module_transforms/a.py"
    file.write_text(file.read_text().replace("predict(self, batch, modules)", "predict(self, batch)"))
    assert "the frozen copy was edited" in call("tiny", home=spoiled, code=2)
    words = ("tiny", "--accept-edited-copy", "--out", f"{tmp_path}/x.json")
    assert "must be callable as predict(batch, modules)" in call(*words, home=spoiled, code=2)
    call(*words, "--no-predictions", home=spoiled)


@pytest.mark.parametrize("name", ["last/trunk.pt", "frzn/stem.pt"])
def test_damaged_weights_are_refused_by_name(spoiled: Path, call: Callable[..., str], name: str) -> None:
    """A file that is not what was committed is named, with the pools that are intact."""
    results = spoiled / "experiment_results/tiny"
    stored = json.loads((results / "state.json").read_text())["generation"]
    manifest = json.loads((results / f"generations/{stored}/manifest.json").read_text())
    file = results / "generations" / manifest["files"][f"module_ckps/{name}"][0]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    said = call("tiny", "--pool", "last", home=spoiled, code=1)
    assert f"{file} is damaged: its content is not what was committed. Intact pools of 'tiny': " in said
    assert "init" in said
    file.unlink()
    assert f"{file} is damaged: No such file" in call("tiny", "--pool", "last", home=spoiled, code=1)


def test_changed_data_is_told(spoiled: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Points that are not those the experiment began with are evaluated, with a warning."""
    file = spoiled / "experiment_results/tiny/pymodules/datasets/a.py"
    file.write_text(file.read_text().replace("Points(50, 0)", "Points(45, 0)"))
    assert main(["evaluate", "tiny", "--accept-edited-copy", "--data-home", str(spoiled)]) == 0
    said = capfd.readouterr().err
    assert "The data is not what tiny began with: datasets/a.py: the val split has 9 points instead of 10" in said


def test_items_of_points_that_stand_for_several_are_kept_apart(tmp_path: Path, call: Callable[..., str]) -> None:
    """With point_size 2, every point has two predictions under its index."""
    double = (
        FILES["pymodules/module_transforms/a.py"]
        .replace("difference = outputs - batch", "difference = outputs.repeat_interleave(2) - batch")
        .replace('batch["y"]', 'batch["y"].repeat_interleave(2)')
    )
    double += """
            def predict(self, batch, modules):
                return {"point": batch["idx"].repeat_interleave(2)}
    """
    loader = 'train_dataloader_args = eval_dataloader_args = {"batch_size": 4, "point_size": 2}\n'
    files: dict[str, Any] = {f"pymodules/dataloaders/{name}.py": loader for name in "ab"}
    write_experiment(tmp_path, files={**files, "pymodules/module_transforms/a.py": double})
    run_inside(tmp_path, "--stop-after-epoch", "0")
    assert main(["evaluate", "tiny", "--out", f"{tmp_path}/x.npz", "--data-home", str(tmp_path)]) == 0
    arrays = load_arrays(tmp_path / "x.npz")
    assert arrays["predictions/a/index"].tolist() == [idx for idx in range(0, 50, 5) for _ in range(2)]
    assert np.array_equal(arrays["predictions/a/index"], arrays["predictions/a/point"])
