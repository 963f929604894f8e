"""Files that mean harm, through every door by which a run reads one: no code runs, nothing is allocated."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.errors import DamagedResults, InvalidExperiment
from pipeline.store.manifest import MANIFEST_FILE, read_sealed_json, sealed_json
from pipeline.system.disk import Digest, Disk
from tests.support.experiments import tree, write_experiment
from tests.support.faults import Killed
from tests.support.hostile import Call, Stored, Tensor, absurd_arrays, compressed, save_hostile
from tests.support.running import run_inside, run_process

RESULTS = Path("experiment_results/tiny")
NAMES = ["epochs", "means", "totals", "items", "steps", "skipped", "grad_norms", "lr_heads"]


def malicious(path: Path, canary: Path) -> None:
    """Write tensors that would create the canary, or arrays of such objects."""
    call = Call(os.mkdir, (str(canary),))
    if path.suffix == ".pt":
        save_hostile(path, call)
    else:
        np.savez(path, **{name: np.array([call], dtype=object) for name in NAMES})


def absurd(path: Path, canary: Path) -> None:
    """Write a shape that no memory could hold."""
    if path.suffix == ".pt":
        save_hostile(path, Tensor(Stored(4), (2**45,), (0,)))
    else:
        absurd_arrays(path, NAMES, "'<f8'", (2**45,))


def bomb(path: Path, canary: Path) -> None:
    """Write a file of a few kilobytes that unfolds to much more."""
    if path.suffix == ".pt":
        save_hostile(path, "x" * 10_000_000)
    else:
        np.savez(path, **{name: np.zeros(1_000_000) for name in NAMES})
    compressed(path)


HARMS = {"malicious": malicious, "absurd": absurd, "bomb": bomb}
Harm = Callable[[Path, Path], None]


@pytest.fixture(params=HARMS.values(), ids=HARMS.keys())
def harm(request: pytest.FixtureRequest) -> Harm:
    """One kind of hostile file."""
    found: Harm = request.param
    return found


def replace_committed(home: Path, name: str, harm: Harm) -> None:
    """Put a hostile file in place of a committed one and make every digest agree with it."""
    generations = home / RESULTS / "generations"
    current = json.loads((home / RESULTS / "state.json").read_text())["generation"]
    manifest_file = generations / str(current) / MANIFEST_FILE
    manifest = read_sealed_json(manifest_file) or {}
    forge(generations, manifest, name, lambda path: harm(path, home / "canary"))
    manifest_file.write_bytes(sealed_json(manifest))


def forge(generations: Path, document: dict[str, Any], name: str, write: Callable[[Path], None]) -> None:
    """Replace a file that a manifest or a list behind it names, and correct the digests on the way there."""
    entry = document["files"].get(name)
    if entry:
        write(generations / entry[0])
    else:
        entry = document.get("sealed") or document["previous"]
        listed = read_sealed_json(generations / entry[0]) or {}
        forge(generations, listed, name, write)
        (generations / entry[0]).write_bytes(sealed_json(listed))
    digest = Digest.of(generations / entry[0])
    entry[1:] = [digest.size, digest.sha256]


def check_refused(home: Path, name: str) -> None:
    """Check that a resume is refused with exit code 1, naming the file and a remedy, and that no code has run."""
    with pytest.raises(DamagedResults) as refusal:
        run_inside(home, "--resume")
    assert refusal.value.exit_code == 1
    assert name in str(refusal.value)
    assert "temp_data" not in str(refusal.value), "a copy that is gone by now is of no use to anyone"
    assert "No intact commit" not in str(refusal.value)
    assert "--reset" in str(refusal.value)
    assert not (home / "canary").exists()


COMMITTED = [
    "module_ckps/last/trunk.pt",
    "module_ckps/frzn/stem.pt",
    "optim_ckps/trunk.pt",
    "sched_data/trunk/then/scheduler.pt",
    "loss_reg_data/train/loss_a/epoch_data.npz",
    "loss_reg_data/val/error/epoch_data.npz",
    "loss_reg_data/train/loss_a/step_data_1.npz",
    "lr_data/heads/step_data_1.npz",
]


@pytest.mark.parametrize("name", COMMITTED)
def test_committed_file_that_means_harm_is_refused(begun: Path, name: str, harm: Harm) -> None:
    """Even with the right digest a committed file is read as a stranger's: refused by name, with a remedy."""
    replace_committed(begun, name, harm)
    check_refused(begun, str(begun / RESULTS / "data" / name))


def hostile_shards(path: Path, canary: Path) -> None:
    """Write what would create the canary, or an index of what no memory could hold."""
    call, pieces = Call(os.mkdir, (str(canary),)), [[[0], [2**45], "__0_0.distcp", 0, 9]]
    if path.suffix == ".json":
        entry = {"path": ["x"], "dtype": "float32", "shape": [2**45], "pieces": pieces}
        path.write_text(json.dumps({"format": 1, "tensors": [entry]}))
    elif path.name == ".metadata":
        path.write_bytes(pickle.dumps(call))
    else:
        save_hostile(path, call)


SHARDS = ["module_ckps/last/trunk/__0_0.distcp", "module_ckps/frzn/stem/index.json", "optim_ckps/trunk/values.pt"]


@pytest.mark.parametrize("name", SHARDS)
def test_committed_shards_that_mean_harm_are_refused(home: Path, name: str) -> None:
    """A folder of shards is read with the same care, and the pickle that torch keeps in it not at all."""
    write_experiment(home, training={"parallelism": "fsdp"})
    run_inside(home, "--stop-after-epoch", "0")
    for hostile in (name, f"{Path(name).parent}/.metadata"):
        replace_committed(home, hostile, hostile_shards)
    check_refused(home, str(home / RESULTS / "data" / Path(name).parent))


def test_steps_of_a_running_epoch_that_mean_harm_are_refused(home: Path, harm: Harm) -> None:
    """The steps that a commit inside an epoch keeps are read with the same care."""

    class Stopping(Disk):
        def rename(self, source: Path, target: Path) -> None:
            super().rename(source, target)
            if target.name == "state.json" and list((home / RESULTS).glob("generations/*/running/*")):
                raise Killed

    with pytest.raises(Killed):
        run_inside(home, disk=Stopping())
    replace_committed(home, "running/steps_000000000.npz", harm)
    check_refused(home, "running/steps_000000000.npz")


@pytest.mark.parametrize("name", ["optim_ckps/trunk.pt", "loss_reg_data/train/loss_a/step_data_1.npz"])
def test_refused_resume_is_one_message_and_no_trace(begun: Path, name: str) -> None:
    """On the terminal a hostile file is one readable message and exit code 1, without a stack trace."""
    replace_committed(begun, name, malicious)
    done = run_process(begun, "--resume")
    assert done.returncode == 1
    assert done.stderr.count(name) == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert not (begun / "canary").exists()


def test_refused_resume_under_torchrun_is_reported_once(begun: Path) -> None:
    """All processes read the file; rank 0 alone reports it."""
    replace_committed(begun, "module_ckps/last/trunk.pt", malicious)
    done = run_process(begun, "--resume", nproc=2)
    assert done.returncode == 1
    assert done.stderr.count("must be a file of tensors") == 1
    assert not (begun / "canary").exists()


def test_columns_that_are_not_those_recorded_are_reported(begun: Path) -> None:
    """A record file that is safe to read but lacks a column is damage, not a crash."""
    replace_committed(begun, "lr_data/heads/step_data_1.npz", lambda path, canary: np.savez(path, steps=np.ones(2)))
    check_refused(begun, "'grad_norms' is missing")


def module_from(source: dict[str, Any]) -> dict[str, str | None]:
    text = f"from torch import nn\n\nmodule = nn.Linear(8, 1)\nsettings = {source!r}\n"
    return {"pymodules/modules/head_a.py": text}


def check_start_refused(home: Path, name: str, path: Path) -> None:
    before = tree(home)
    with pytest.raises(InvalidExperiment, match="head_a") as refusal:
        run_inside(home, name=name)
    assert refusal.value.exit_code == 2
    assert str(path) in str(refusal.value)
    assert not (home / "canary").exists()
    assert tree(home) == before


def test_weight_file_that_means_harm_is_refused(tmp_path: Path, harm: Harm) -> None:
    """A file among the checkpoints is a stranger's work: the experiment that names it is refused, disk untouched."""
    write_experiment(tmp_path, files=module_from({"load_weights_from_ckp": {"ckp_name": "head.pt"}}))
    path = tmp_path / "module_ckps/head.pt"
    path.parent.mkdir()
    harm(path, tmp_path / "canary")
    check_start_refused(tmp_path, "tiny", path)


def test_pool_of_another_experiment_that_means_harm_is_refused(begun: Path, harm: Harm) -> None:
    """The same holds for weights in another experiment's pool."""
    source = {"exp_name": "tiny", "ckp_pool_name": "best", "module_name": "head_b"}
    write_experiment(begun, "second", files=module_from({"load_weights_from_exp": source}))
    path = begun / RESULTS / "data/module_ckps/best/head_b.pt"
    path.unlink()
    harm(path, begun / "canary")
    check_start_refused(begun, "second", path)


def test_refused_weight_file_is_one_message_and_no_trace(tmp_path: Path) -> None:
    """On the terminal the file and the pymodule that names it are reported, with exit code 2."""
    write_experiment(tmp_path, files=module_from({"load_weights_from_ckp": {"ckp_name": "head"}}))
    (tmp_path / "module_ckps").mkdir()
    malicious(tmp_path / "module_ckps/head.pt", tmp_path / "canary")
    done = run_process(tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("module_ckps/head.pt") == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "dangling"])
def test_weight_file_that_is_no_file_does_not_hang(tmp_path: Path, kind: str) -> None:
    """A pipe, a device, a folder or a link to nowhere in place of weights is refused at once."""
    write_experiment(tmp_path, files=module_from({"load_weights_from_ckp": {"ckp_name": "head.pt"}}))
    path = tmp_path / "module_ckps/head.pt"
    path.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else "nowhere")
    with pytest.raises(InvalidExperiment, match=r"head\.pt"):
        run_inside(tmp_path)


@pytest.mark.parametrize("value", [7, {"weight": 1}, [1]])
def test_weights_of_another_kind_are_reported(tmp_path: Path, value: Any) -> None:
    """A harmless file that holds no tensors is reported as what it is."""
    write_experiment(tmp_path, files=module_from({"load_weights_from_ckp": {"ckp_name": "head.pt"}}))
    (tmp_path / "module_ckps").mkdir()
    torch.save({"weight": value, "bias": torch.ones(1)}, tmp_path / "module_ckps/head.pt")
    with pytest.raises(InvalidExperiment, match=r"weight of type \w+ instead of \(1, 8\)"):
        run_inside(tmp_path)
