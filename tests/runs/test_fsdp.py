"""Sharded modules: the same training as with whole ones, at any number of processes, and after any interruption."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.__main__ import main
from pipeline.distributed.processes import Processes
from pipeline.serialization.torch_files import load_tensors
from pipeline.store.compare import first_difference, read_any
from tests.runs.test_evaluate import evaluate
from tests.support.experiments import FILES, write_experiment
from tests.support.reshard import reshard
from tests.support.running import environment, run_inside, run_process
from tests.unit.commands.test_evaluate import EXPERIMENT

FSDP = {"parallelism": "fsdp"}
_TRANSFORM = "pymodules/module_transforms/a.py"
# The trunk is run twice, in units of its own; a point of each dataset makes a step be skipped; pictures need all ranks;
# a head has tied weights inside one unit, and another unit that it holds under two names.
TRAPS: dict[str, str | None] = {
    _TRANSFORM: FILES[_TRANSFORM].replace(
        "return {self.register: difference**2",
        """again = modules["trunk"](modules["stem"](-batch["x"]))
                difference = difference + again.mean(dim=1) + (0 if 7 not in batch["idx"] else float("nan"))
                return {self.register: difference**2""",
    )
    + """
            def images(self, batch, modules):
                return {"trunk": modules["trunk"](modules["stem"](batch["x"]))}
    """,
    "pymodules/modules/trunk.py": FILES["pymodules/modules/trunk.py"].replace('"frozen": False', '"shard": ["[01]"]'),
    "pymodules/modules/stem.py": FILES["pymodules/modules/stem.py"].replace("True}", "True, 'shard': []}"),
    "pymodules/modules/head_b.py": """
        from torch import nn


        class Head(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second, self.block = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
                self.second.weight = self.first.weight
                self.again, self.last = self.block, nn.Linear(8, 1)

            def forward(self, x):
                return self.last(self.again(self.block(self.second(self.first(x)).relu()).relu()))


        module = Head()
        settings = {"shard": ["block"]}
    """,
}
TIED_MODULES: dict[str, str | None] = {
    "pymodules/modules/head_b.py": """
        from torch import nn

        from . import head_a

        module = nn.Linear(8, 1)
        module.weight = head_a.module.weight
        settings = {}
    """,
    "pymodules/optim_sched/heads.py": FILES["pymodules/optim_sched/heads.py"].replace(
        '*modules["head_b"].parameters()', 'modules["head_b"].bias'
    ),
}


def data(home: Path, name: str) -> Path:
    return home / "experiment_results" / name / "data"


def run_sharded(home: Path, *words: str, nproc: int, name: str = "tiny") -> str:
    done = run_process(home, *words, name=name, nproc=nproc)
    assert done.returncode == 0, done.stderr
    return done.stderr


def arrays(value: Any, path: str = "") -> dict[str, np.ndarray]:
    """Return every number of a results file by its place in it."""
    if isinstance(value, dict):
        return {key: one for name, child in value.items() for key, one in arrays(child, f"{path}/{name}").items()}
    if isinstance(value, torch.Tensor):
        return {path: value.double().numpy()}
    return {path: np.asarray(value, dtype=np.float64)} if isinstance(value, np.ndarray) else {}


def check_close(found: Path, expected: Path, tolerance: float = 1e-5) -> None:
    """Weights, optimizer states, losses, norms and rates are equal up to rounding."""
    paths = [*expected.glob("module_ckps/*/*.pt"), *expected.glob("optim_ckps/*.pt"), *expected.rglob("*_data_*.npz")]
    assert len(paths) > 10
    for path in paths:
        other = found / path.relative_to(expected)
        one, two = arrays(read_any(other if other.exists() else other.with_suffix(""))), arrays(read_any(path))
        assert one.keys() == two.keys()
        for key in one:
            np.testing.assert_allclose(one[key], two[key], rtol=tolerance, atol=tolerance, err_msg=f"{path}{key}")


def test_sharded_training_is_that_of_whole_modules(tmp_path: Path) -> None:
    """Two processes with sharded modules learn what one process with whole ones learns, up to rounding."""
    write_experiment(tmp_path, files=TRAPS, training=FSDP)
    write_experiment(tmp_path, "whole", files=TRAPS)
    run_sharded(tmp_path, nproc=2)
    run_inside(tmp_path, name="whole")
    check_close(data(tmp_path, "tiny"), data(tmp_path, "whole"))
    skipped = read_any(data(tmp_path, "tiny") / "loss_reg_data/train/loss_a/step_data_1.npz")["skipped"]
    assert skipped.sum() == 2
    assert list((tmp_path / "experiment_logs/tiny").rglob("*.png"))
    before, after = (read_any(data(tmp_path, "tiny") / f"module_ckps/{pool}/head_b") for pool in ("init", "last"))
    for one, other in (("first.weight", "second.weight"), ("block.weight", "again.weight")):
        assert not torch.equal(before[one], after[one])
        assert torch.equal(after[one], after[other])


def test_weights_of_two_modules_stay_tied_with_ddp(tmp_path: Path) -> None:
    """Two processes with whole modules train a weight that two modules share as one process does."""
    for name in ("tiny", "alone"):
        write_experiment(tmp_path, name, files=TIED_MODULES)
    run_sharded(tmp_path, "--stop-after-epoch", "1", nproc=2)
    run_inside(tmp_path, "--stop-after-epoch", "1", name="alone")
    check_close(data(tmp_path, "tiny"), data(tmp_path, "alone"))
    before, *after = (
        read_any(data(tmp_path, "tiny") / "module_ckps" / path)["weight"]
        for path in ("init/head_a.pt", "last/head_a.pt", "last/head_b.pt")
    )
    assert not torch.equal(before, after[0])
    assert torch.equal(*after)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "nproc"), [("bf16", 2), ("fp16", 2), ("fp32", 4)])
def test_sharded_training_is_that_of_ddp(tmp_path: Path, precision: str, nproc: int) -> None:
    """Reduced precision, overflowing gradients and more processes than batches change nothing."""
    settings = {"data_loading": {"step_min_items": 9}}
    write_experiment(tmp_path, files=TRAPS, training={**FSDP, "precision": precision}, **settings)
    write_experiment(tmp_path, "whole", files=TRAPS, training={"precision": precision}, **settings)
    run_sharded(tmp_path, nproc=nproc)
    run_sharded(tmp_path, nproc=nproc, name="whole")
    check_close(data(tmp_path, "tiny"), data(tmp_path, "whole"), 1e-5 if precision == "fp32" else 1e-3)


@pytest.mark.slow
def test_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    """A run of three processes that was stopped inside an epoch ends as one that was not."""
    for name in ("tiny", "whole"):
        write_experiment(tmp_path, name, files=TRAPS, training=FSDP)
    run_sharded(tmp_path, "--stop-after-epoch", "1", nproc=3)
    run_sharded(tmp_path, "--resume", nproc=3)
    run_sharded(tmp_path, nproc=3, name="whole")
    assert first_difference(data(tmp_path, "tiny"), data(tmp_path, "whole")) is None


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment whose first epoch was trained by two processes."""
    home = tmp_path_factory.mktemp("begun")
    write_experiment(home, training=FSDP)
    run_sharded(home, "--stop-after-epoch", "1", nproc=2)
    return home


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same experiment with whole modules."""
    home = tmp_path_factory.mktemp("finished")
    write_experiment(home)
    run_inside(home)
    return data(home, "tiny")


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 3, 4])
def test_other_numbers_of_processes_go_on(begun: Path, finished: Path, tmp_path: Path, nproc: int) -> None:
    """What two processes have saved, any number continues and finishes, up to rounding."""
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True, symlinks=True)
    run_sharded(tmp_path, "--resume", nproc=nproc)
    check_close(data(tmp_path, "tiny"), finished)


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 3, 4])
def test_other_numbers_of_processes_read_the_same_bits(begun: Path, tmp_path: Path, nproc: int) -> None:
    """Weights and moments are those that were saved, however they are cut."""
    saved = data(begun, "tiny")
    if nproc == 1:
        reshard(saved, tmp_path, Processes())
    else:
        launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={nproc}"]
        line = [*launcher, "-m", "tests.support.reshard", str(saved), str(tmp_path)]
        subprocess.run(line, env=environment(), check=True, timeout=120)
    for part in ("module_ckps/last/trunk", "optim_ckps/trunk"):
        assert len(list((tmp_path / part).glob("*.distcp"))) == nproc
        assert first_difference((saved / part).parent / "trunk", tmp_path / part) is None


def test_sharded_results_are_read_like_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process has the layout of many: export makes one file, evaluate and other experiments read it."""
    monkeypatch.chdir(tmp_path)
    write_experiment(tmp_path, training=FSDP)
    write_experiment(tmp_path, "whole")
    for name in ("tiny", "whole"):
        run_inside(tmp_path, "--stop-after-epoch", "1", name=name)
        assert main(["export", f"{name}:last", "--out", f"{name}.pt", "--data-home", str(tmp_path)]) == 0
        words = ["evaluate", name, "--pool", "last", "--split", "val", "--out", f"{name}.json"]
        assert main([*words, "--data-home", str(tmp_path)]) == 0
    exported = [load_tensors(Path(f"{name}.pt")) for name in ("tiny", "whole")]
    assert all((arrays(exported[0])[key] == value).all() for key, value in arrays(exported[1]).items())
    assert main(["fsck", "tiny", "--data-home", str(tmp_path)]) == 0


@pytest.mark.parametrize(("source", "training"), [("tiny", {}), ("whole", FSDP)])
def test_weights_go_from_one_layout_to_the_other(tmp_path: Path, source: str, training: dict[str, Any]) -> None:
    """An experiment starts from weights of another, whichever of them is sharded."""
    write_experiment(tmp_path, source, training=FSDP if source == "tiny" else {})
    run_inside(tmp_path, "--stop-after-epoch", "0", name=source)
    weights = f"{{'exp_name': '{source}', 'ckp_pool_name': 'init', 'module_name': 'head_b'}}"
    module = f"from torch import nn\n\nmodule = nn.Linear(8, 1)\nsettings = {{'load_weights_from_exp': {weights}}}\n"
    write_experiment(tmp_path, "second", files={"pymodules/modules/head_a.py": module}, training=training)
    run_inside(tmp_path, "--stop-after-epoch", "0", name="second")
    pools = [data(tmp_path, name) / "module_ckps/init" for name in (source, "second")]
    paths = [pools[0] / "head_b", pools[1] / "head_a"]
    found = [arrays(read_any(path if path.is_dir() else path.with_suffix(".pt"))) for path in paths]
    assert all((found[0][key] == value).all() for key, value in found[1].items())


@pytest.mark.slow
def test_sharded_evaluation_predicts_every_item_once(tmp_path: Path) -> None:
    """Three processes that hold shards evaluate and predict, to the bit, what one with whole modules does."""
    write_experiment(tmp_path, files=EXPERIMENT, training=FSDP)
    run_inside(tmp_path, "--stop-after-epoch", "0")
    words = ("tiny", "--split", "train", "--out")
    done = evaluate(tmp_path, *words, f"{tmp_path}/many.pt", nproc=3)
    assert done.returncode == 0, done.stderr
    assert main(["evaluate", *words, f"{tmp_path}/one.pt", "--data-home", str(tmp_path)]) == 0
    one, many = (load_tensors(tmp_path / f"{name}.pt") for name in ("one", "many"))
    assert many["values"] == one["values"]
    for name, column in one["predictions"]["a"].items():
        assert torch.equal(column, many["predictions"]["a"][name])


@pytest.mark.slow
def test_rank_that_cannot_write_stops_all(tmp_path: Path) -> None:
    """A shard that does not fit ends every process with the last commit intact, and the run goes on from there."""
    limit = """
        import os
        import resource
        from pathlib import Path

        from torch import nn

        from pipeline.components import BaseScheduler


        def limit_files(step):
            if os.environ.get("RANK") == "1" and not Path(os.environ["MAY_WRITE"]).exists() and step == 3:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))


        class Limit(BaseScheduler):
            def after_train_step(self, step):
                limit_files(step)
    """
    heads = FILES["pymodules/optim_sched/heads.py"].replace("return BaseScheduler()", "return Limit()")
    heads = heads.replace("from pipeline.components import BaseScheduler", "from ..utils.limits import Limit")
    write_experiment(
        tmp_path, files={"pymodules/utils/limits.py": limit, "pymodules/optim_sched/heads.py": heads}, training=FSDP
    )
    env = {"MAY_WRITE": str(tmp_path / "may_write")}
    done = run_process(tmp_path, nproc=2, env=env)
    assert done.returncode == 1
    assert "on rank 1: [Errno 27] File too large. The last commit is intact." in done.stderr
    (tmp_path / "may_write").touch()
    assert run_process(tmp_path, "--resume", nproc=2, env=env).returncode == 0
