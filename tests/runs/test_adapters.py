"""Small commits: what is not trained is written once, or not at all, and every reader puts modules together again."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.checkpoint import constants
from pipeline.errors import InvalidExperiment, PipelineError
from pipeline.evaluation.exported_module import from_experiment
from pipeline.paths import ExperimentPaths
from pipeline.serialization.torch_files import load_tensors
from pipeline.store.compare import first_difference, read_any
from pipeline.store.manifest import Manifest
from pipeline.store.store import read_current_manifest
from tests.support.experiments import FILES, tree, write_experiment
from tests.support.running import environment, run_inside, run_process
from tests.support.verbs import call

DATA = Path("experiment_results/tiny/data")
POOLS = DATA / "module_ckps"
# The first layer of the trunk is not trained, but for two small factors.
ADAPTED: dict[str, str | None] = {
    "pymodules/utils/low_rank.py": """
        import torch
        from torch import nn


        class LowRank(nn.Linear):
            def __init__(self, num_inputs, num_outputs):
                super().__init__(num_inputs, num_outputs)
                self.requires_grad_(False)
                self.down = nn.Parameter(torch.randn(2, num_inputs) / 2)
                self.up = nn.Parameter(torch.zeros(num_outputs, 2))

            def forward(self, inputs):
                return super().forward(inputs) + inputs @ self.down.T @ self.up.T
    """,
    "pymodules/modules/trunk.py": """
        from torch import nn

        from ..utils.low_rank import LowRank

        module = nn.Sequential(LowRank(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))
        settings = {}
    """,
}
CONSTANT = ["0.weight", "0.bias"]
# Unfreezes the weight within epoch 2, and shifts the bias for some steps. None of it is said again after a resume.
# A run with KILL_AT=EPOCH,STEP is killed after that step.
UNFREEZING = """
    import os
    import signal

    from torch.optim import SGD

    from pipeline.components import BaseScheduler
    from pipeline.components.stateful import load_json, save_json

    from ..modules import trunk


    class Unfreezing(BaseScheduler):
        epoch = 0

        def before_train_epoch(self, num_steps):
            self.epoch += 1

        def after_train_step(self, step):
            if (self.epoch, step) == (2, 2):
                trunk.module[0].weight.requires_grad_(True)
                trunk.module[0].bias.data.add_(0.125)
            if (self.epoch, step) == (3, 1):
                trunk.module[0].bias.data.copy_(trunk.first_bias)
            if os.environ.get("KILL_AT") == f"{self.epoch},{step}":
                os.kill(os.getpid(), signal.SIGKILL)

        def save(self, folder):
            save_json(folder, {"epoch": self.epoch})

        def load(self, folder):
            self.epoch = load_json(folder)["epoch"]


    def create_optimizer(modules):
        params = [*modules["head_a"].parameters(), *modules["head_b"].parameters()]
        return SGD([{"name": "heads", "params": params}], lr=0.02, momentum=0.9)


    def create_scheduler(optimizer):
        return Unfreezing()
"""
UNFROZEN: dict[str, str | None] = {
    **ADAPTED,
    "pymodules/modules/trunk.py": str(ADAPTED["pymodules/modules/trunk.py"]).replace(
        "settings =", "first_bias = module[0].bias.detach().clone()\n        settings ="
    ),
    "pymodules/optim_sched/heads.py": UNFREEZING,
}


def write(home: Path, files: dict[str, str | None] | None = None, name: str = "tiny", **training: Any) -> Path:
    return write_experiment(home, name, files={**ADAPTED, **(files or {})}, training=training)


def trunk_with(settings: str) -> dict[str, str | None]:
    return {"pymodules/modules/trunk.py": str(ADAPTED["pymodules/modules/trunk.py"]).replace("{}", settings)}


def keys(home: Path, pool: str, module: str = "trunk") -> list[str]:
    return list(read_any(home / POOLS / pool / f"{module}.pt"))


def whole(home: Path, pool: str, module: str = "trunk") -> dict[str, torch.Tensor]:
    """Return a module as the docs say: the constant parameters, and the pool's values."""
    constant, rest = (load_tensors(home / POOLS / folder / f"{module}.pt") for folder in ("constant", pool))
    return {**constant, **rest}


def manifest(home: Path) -> Manifest:
    found = read_current_manifest(ExperimentPaths(home, "tiny"))
    assert found is not None
    return found


def test_what_is_not_trained_is_written_once(tmp_path: Path) -> None:
    """The first commit has a file of constant parameters, which later ones link; all pools hold the rest."""
    write(tmp_path)
    run_inside(tmp_path)
    assert keys(tmp_path, "constant") == CONSTANT
    for pool in ("init", "last", "best", "epoch_2"):
        assert not {*CONSTANT} & {*keys(tmp_path, pool)}
        assert {"0.down", "0.up", "1.running_mean"} <= {*keys(tmp_path, pool)}
    assert manifest(tmp_path).files["module_ckps/constant/trunk.pt"].generation == 1
    assert sorted(path.name for path in (tmp_path / POOLS / "constant").iterdir()) == ["trunk.pt"]
    trained = whole(tmp_path, "last")
    assert {*trained} == {*CONSTANT, *keys(tmp_path, "last")}
    assert not torch.equal(trained["0.up"], whole(tmp_path, "init")["0.up"])


def test_trained_modules_have_no_constant_files(tmp_path: Path) -> None:
    """An experiment whose modules are trained whole, or frozen whole, has the files that it always had."""
    write_experiment(tmp_path)
    run_inside(tmp_path, "--stop-after-epoch", "1")
    assert not (tmp_path / POOLS / "constant").exists()
    assert {path.split("/")[1] for path in manifest(tmp_path).files if path.startswith("module_ckps")} == {
        "best",
        "epoch_1",
        "frzn",
        "init",
        "last",
    }


@pytest.mark.parametrize(
    ("nproc", "reduction", "kill_at"),
    [
        (1, "fast", "2,3"),
        pytest.param(2, "fast", "2,3", marks=pytest.mark.slow),
        pytest.param(2, "fast", "1,4", marks=pytest.mark.slow),
        pytest.param(2, "fast", "3,3", marks=pytest.mark.slow),
        pytest.param(1, "exact", "2,3", marks=pytest.mark.slow),
        pytest.param(3, "exact", "2,3", marks=pytest.mark.slow),
    ],
)
def test_changed_parameters_survive_a_kill(tmp_path: Path, nproc: int, reduction: str, kill_at: str) -> None:
    """Killed before or after a parameter is unfrozen or assigned, a run ends with the files of an undisturbed one."""
    homes = {name: tmp_path / name for name in ("whole", "killed")}
    for home in homes.values():
        write(home, UNFROZEN, gradient_reduction=reduction, checkpoint_in_background=False)
    launched = nproc if nproc > 1 else None
    done = run_process(homes["whole"], nproc=launched)
    assert done.returncode == 0, done.stderr
    assert run_process(homes["killed"], nproc=launched, env={"KILL_AT": kill_at}).returncode != 0
    done = run_process(homes["killed"], "--resume", nproc=launched)
    assert done.returncode == 0, done.stderr
    assert "continues at epoch" in done.stdout
    assert first_difference(homes["whole"] / DATA, homes["killed"] / DATA) is None
    home = homes["killed"]
    # The weight has been trained since. The bias is in the pool of epoch 2 alone: it has its first value again.
    assert [[name in keys(home, pool) for name in CONSTANT] for pool in ("init", "epoch_2", "last")] == [
        [False, False],
        [True, True],
        [True, False],
    ]
    assert not torch.equal(whole(home, "last")["0.weight"], whole(home, "init")["0.weight"])


@pytest.mark.slow
def test_exact_bits_do_not_depend_on_processes(tmp_path: Path) -> None:
    """One, two and three processes write the same bits, also of what is unfrozen meanwhile."""
    for nproc in (1, 2, 3):
        write(tmp_path / str(nproc), UNFROZEN, gradient_reduction="exact")
        done = run_process(tmp_path / str(nproc), nproc=nproc if nproc > 1 else None)
        assert done.returncode == 0, done.stderr
    for nproc in (2, 3):
        assert first_difference(tmp_path / "1" / DATA, tmp_path / str(nproc) / DATA) is None


def test_readers_put_modules_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Evaluations give the recorded values, and exports hold whole modules, or with --adapters what pools hold."""
    write(tmp_path)
    run_inside(tmp_path, "--set", "training.max_epochs=2")
    capsys.readouterr()
    assert call(tmp_path, "evaluate", "tiny", "--pool", "last", "--json") == 0
    values = json.loads(capsys.readouterr().out)["values"]
    recorded = read_any(tmp_path / DATA / "loss_reg_data/val/loss_a/epoch_data.npz")["means"][-1]
    assert values["loss_a"]["mean"] == recorded
    assert call(tmp_path, "export", "tiny:last", "--out", str(tmp_path / "all.pt")) == 0
    exported = load_tensors(tmp_path / "all.pt")
    assert {*exported} == {"stem", "trunk", "head_a", "head_b"}
    expected = whole(tmp_path, "last")
    assert {*exported["trunk"]} == {*expected}
    assert all(torch.equal(exported["trunk"][name], tensor) for name, tensor in expected.items())
    assert call(tmp_path, "export", "tiny:last", "--adapters", "--out", str(tmp_path / "small.pt")) == 0
    small = load_tensors(tmp_path / "small.pt")
    assert {*small} == {"trunk", "head_a", "head_b"}
    assert list(small["trunk"]) == keys(tmp_path, "last")
    for words in (("evaluate", "tiny", "--pool", "constant"), ("export", "tiny:constant", "--out", "x.pt")):
        assert call(tmp_path, *words) == 2
        assert "'tiny' has no pool 'constant'; there are best, epoch_1, epoch_2, init, last." in capsys.readouterr().err


def test_other_experiments_start_from_whole_modules(tmp_path: Path) -> None:
    """A module that starts from a pool of another experiment gets what all pools have in common as well."""
    write(tmp_path)
    run_inside(tmp_path, "--stop-after-epoch", "1")
    source = {"exp_name": "tiny", "ckp_pool_name": "best", "module_name": "trunk"}
    write(tmp_path, trunk_with(f"{{'load_weights_from_exp': {source}}}"), name="other", seed=8)
    run_inside(tmp_path, "--stop-after-epoch", "1", name="other")
    other = tmp_path / "experiment_results/other/data/module_ckps"
    start = {**load_tensors(other / "constant/trunk.pt"), **load_tensors(other / "init/trunk.pt")}
    expected = whole(tmp_path, "best")
    assert all(torch.equal(start[name], tensor) for name, tensor in expected.items())


def test_damaged_constant_file_damages_all_pools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """fsck and evaluate say that no pool is whole without it; clean never removes it."""
    write(tmp_path)
    run_inside(tmp_path)
    assert call(tmp_path, "clean", "tiny", "--yes") == 0
    assert call(tmp_path, "fsck", "tiny") == 0
    assert call(tmp_path, "evaluate", "tiny") == 0
    file = tmp_path / POOLS / "constant/trunk.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    capsys.readouterr()
    assert call(tmp_path, "fsck", "tiny") == 1
    assert "damaged weight pools: best, init, last; intact: frzn" in capsys.readouterr().out
    assert call(tmp_path, "evaluate", "tiny") == 1
    assert "Intact pools of 'tiny': frzn." in capsys.readouterr().err


def test_whole_files_of_earlier_versions_stay_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that began without a constant file resume, evaluate and export, and keep writing whole files."""
    with monkeypatch.context() as patch:
        patch.setattr(constants, "constant_names", lambda components, training: {})
        for name in ("tiny", "uninterrupted"):
            write(tmp_path, name=name)
        run_inside(tmp_path, "--stop-after-epoch", "1")
        run_inside(tmp_path, name="uninterrupted")
    run_inside(tmp_path, "--resume")
    assert {*CONSTANT} <= {*keys(tmp_path, "last")}
    other = tmp_path / "experiment_results/uninterrupted/data"
    assert first_difference(tmp_path / DATA, other) is None
    assert call(tmp_path, "evaluate", "tiny") == 0
    assert call(tmp_path, "export", "tiny:last:trunk", "--out", str(tmp_path / "trunk.pt")) == 0
    exported = load_tensors(tmp_path / "trunk.pt")["trunk"]
    assert all(
        torch.equal(value, exported[name]) for name, value in read_any(tmp_path / POOLS / "last/trunk.pt").items()
    )


AVERAGE: dict[str, str | None] = {"pymodules/modules/ema.py": "settings = {'average_of': 'trunk', 'decay': 0.9}\n"}


@pytest.mark.parametrize("settings", ["{}", "{'save': 'trained'}"])
def test_average_shares_the_constant_file_of_its_source(tmp_path: Path, settings: str) -> None:
    """An average of adapters is as small as they are, whole for every reader, and the same after a resume."""
    for name in ("tiny", "stopped"):
        write(tmp_path, {**trunk_with(settings), **AVERAGE}, name=name)
    run_inside(tmp_path)
    run_inside(tmp_path, "--stop-after-epoch", "2", name="stopped")
    run_inside(tmp_path, "--resume", name="stopped")
    assert first_difference(tmp_path / DATA, tmp_path / "experiment_results/stopped/data") is None
    suffix = ".json" if "save" in settings else ".pt"
    entries = [manifest(tmp_path).files[f"module_ckps/constant/{name}{suffix}"] for name in ("trunk", "ema")]
    assert entries[0] == entries[1]
    assert keys(tmp_path, "last", "ema") == keys(tmp_path, "last")
    assert call(tmp_path, "evaluate", "tiny") == 0
    exported = {
        one.name: one.weights
        for one in from_experiment(ExperimentPaths(tmp_path, "tiny"), "last", None, trained_only=True)
    }
    assert {*exported["ema"]} == {*exported["trunk"]}
    for name in CONSTANT:
        assert torch.equal(exported["ema"][name], exported["trunk"][name])  # type: ignore[arg-type]
    assert not torch.equal(exported["ema"]["0.up"], exported["trunk"]["0.up"])  # type: ignore[arg-type]


def test_commit_of_adapters_is_as_large_as_they_are(tmp_path: Path) -> None:
    """A commit within an epoch writes the adapters and their optimizer states, whatever lies below them."""
    wide = str(ADAPTED["pymodules/modules/trunk.py"]).replace("LowRank(6, 8)", "LowRank(6, 8), nn.Linear(8, 400)")
    wide = wide.replace("nn.BatchNorm1d(8)", "LowRank(400, 8), nn.BatchNorm1d(8)")
    wide = wide.replace("settings", "module[1].requires_grad_(False)\n        settings")
    write(tmp_path, {"pymodules/modules/trunk.py": wide}, checkpoint_every_steps=1)
    run_inside(tmp_path, "--stop-after-epoch", "1")
    sizes = {path: entry.digest.size for path, entry in manifest(tmp_path).files.items()}
    state = read_any(tmp_path / POOLS / "last/trunk.pt")
    assert sizes["module_ckps/constant/trunk.pt"] > 6 * sum(tensor.nbytes for tensor in state.values())
    # A file of torch has some hundred bytes for each of its tensors.
    assert sizes["module_ckps/last/trunk.pt"] < sum(tensor.nbytes + 400 for tensor in state.values())


# Below: modules whose constant parameters are not saved.


def file_source(home: Path) -> dict[str, str | None]:
    """Write a file of weights, and return a trunk that starts from it and leaves it out of commits."""
    (home / "module_ckps").mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(5)
    weights = {"0.weight": torch.randn(8, 6, generator=generator), "0.bias": torch.zeros(8)}
    torch.save(weights, home / "module_ckps/base.pt")
    return trunk_with("{'save': 'trained', 'strict': False, 'load_weights_from_ckp': {'ckp_name': 'base'}}")


def test_record_stands_for_what_is_not_saved(tmp_path: Path) -> None:
    """With save: trained, the results hold digests of the constant parameters, and every reader rebuilds these."""
    for name in ("tiny", "stopped"):
        write(tmp_path, file_source(tmp_path), name=name)
    run_inside(tmp_path)
    run_inside(tmp_path, "--stop-after-epoch", "1", name="stopped")
    run_inside(tmp_path, "--resume", name="stopped")
    assert first_difference(tmp_path / DATA, tmp_path / "experiment_results/stopped/data") is None
    record = json.loads((tmp_path / POOLS / "constant/trunk.json").read_text())
    assert record["source"] == "the file base (load_weights_from_ckp)"
    assert list(record["digests"]) == sorted(CONSTANT)
    assert not (tmp_path / POOLS / "constant/trunk.pt").exists()
    assert call(tmp_path, "evaluate", "tiny", "--pool", "last", "--out", str(tmp_path / "values.json")) == 0
    values = json.loads((tmp_path / "values.json").read_text())["values"]
    recorded = read_any(tmp_path / DATA / "loss_reg_data/val/loss_a/epoch_data.npz")["means"][-1]
    assert values["loss_a"]["mean"] == recorded
    assert call(tmp_path, "export", "tiny:last:trunk", "--out", str(tmp_path / "trunk.pt")) == 0
    exported = load_tensors(tmp_path / "trunk.pt")["trunk"]
    base = load_tensors(tmp_path / "module_ckps/base.pt")
    assert all(torch.equal(exported[name], base[name]) for name in CONSTANT)


@pytest.mark.slow
@pytest.mark.parametrize("is_saved", [True, False])
def test_steps_are_traced_again(tmp_path: Path, is_saved: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """A copy of the experiment in another folder finds what commits leave out, and has the recorded bits."""
    write(tmp_path, None if is_saved else file_source(tmp_path))
    run_inside(tmp_path, "--stop-after-epoch", "2")
    assert call(tmp_path, "replay", "tiny", "--epoch", "2", "--step", "3") == 0
    assert "identical to the record" in capsys.readouterr().out
    assert call(tmp_path, "verify-resume", "tiny", "--steps", "4", "--kills", "1") == 0


def test_changed_or_missing_source_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Resume, evaluate and export name module, parameter and source, and change nothing."""
    write(tmp_path, file_source(tmp_path))
    run_inside(tmp_path, "--stop-after-epoch", "1")
    before = tree(tmp_path / "experiment_results/tiny/data")
    file = tmp_path / "module_ckps/base.pt"
    weights = load_tensors(file)
    file.unlink()
    verbs = (("evaluate", "tiny"), ("export", "tiny", "--out", str(tmp_path / "out.pt")))
    missing = f'save: "trained" needs what this module began with, but load_weights_from_ckp needs {file}'
    with pytest.raises(InvalidExperiment, match=r"modules/trunk\.py: ") as error:
        run_inside(tmp_path, "--resume")
    assert missing in str(error.value)
    for words in verbs:
        assert call(tmp_path, *words) == 2
        assert missing in capsys.readouterr().err
    weights["0.bias"][3] = -0.0
    torch.save(weights, file)
    with pytest.raises(PipelineError, match=r"modules/trunk\.py: with save: ") as changed:
        run_inside(tmp_path, "--resume")
    told = (
        "come from the file base (load_weights_from_ckp) and must be what they were when the experiment began, "
        "but 0.bias differ"
    )
    assert told in str(changed.value)
    for words in verbs:
        assert call(tmp_path, *words) == 1
        assert told in capsys.readouterr().err
    assert tree(tmp_path / "experiment_results/tiny/data") == before
    assert not (tmp_path / "out.pt").exists()


def test_partly_saved_module_is_no_source_but_its_export_is(tmp_path: Path) -> None:
    """Another experiment cannot start from a part of a module; the printed line makes a file that it can start from."""
    write(tmp_path, trunk_with("{'save': 'trained'}"))
    run_inside(tmp_path, "--stop-after-epoch", "1")
    source = {"exp_name": "tiny", "ckp_pool_name": "best", "module_name": "trunk"}
    write(tmp_path, trunk_with(f"{{'load_weights_from_exp': {source}}}"), name="other")
    with pytest.raises(InvalidExperiment, match='tiny:best:trunk has save: "trained"') as error:
        run_inside(tmp_path, name="other")
    (line,) = [
        line.partition("fix: ")[2] for line in str(error.value).splitlines() if " export tiny:best:trunk" in line
    ]
    pasted = subprocess.run(line, shell=True, env=environment(), capture_output=True, text=True, check=False)
    assert pasted.returncode == 0, f"{line}\n{pasted.stderr}"
    assert "with ckp_name 'trunk'" in str(error.value)
    write(tmp_path, trunk_with("{'load_weights_from_ckp': {'ckp_name': 'trunk'}}"), name="other")
    run_inside(tmp_path, "--stop-after-epoch", "1", name="other")


def test_own_file_and_frozen_modules_may_be_left_out(tmp_path: Path) -> None:
    """What a module's file draws is drawn again at every start; of a frozen module the buffers alone are saved."""
    stem = str(FILES["pymodules/modules/stem.py"]).replace('"frozen": True', '"frozen": True, "save": "trained"')
    files = {**trunk_with("{'save': 'trained'}"), "pymodules/modules/stem.py": stem}
    for name in ("tiny", "stopped"):
        write(tmp_path, files, name=name)
    run_inside(tmp_path)
    run_inside(tmp_path, "--stop-after-epoch", "1", name="stopped")
    run_inside(tmp_path, "--resume", name="stopped")
    assert first_difference(tmp_path / DATA, tmp_path / "experiment_results/stopped/data") is None
    assert keys(tmp_path, "frzn", "stem") == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    record = json.loads((tmp_path / POOLS / "constant/trunk.json").read_text())
    assert record["source"] == "pymodules/modules/trunk.py"
    assert call(tmp_path, "evaluate", "tiny") == 0
    assert call(tmp_path, "export", "tiny", "--out", str(tmp_path / "all.pt")) == 0
    assert {"0.weight", "1.weight", "1.running_mean"} <= {*load_tensors(tmp_path / "all.pt")["stem"]}


@pytest.mark.parametrize(
    ("files", "training", "told"),
    [
        (
            {
                "pymodules/modules/head_a.py": """
                    from torch import nn

                    module = nn.Linear(8, 1)
                    settings = {"save": "trained"}
                """
            },
            {},
            'head_a.py:4: save: "trained" leaves parameters that need no gradient out of commits, but head_a has none',
        ),
        (
            trunk_with("{'save': 'trained'}"),
            {"parallelism": "fsdp"},
            'save: "trained" must not be used with parallelism: fsdp, whose shards always hold whole modules',
        ),
        (trunk_with("{'save': 'some'}"), {}, "settings['save'] must be \"all\" or \"trained\", but is 'some'"),
        (
            {"pymodules/modules/ema.py": "settings = {'average_of': 'trunk', 'save': 'trained'}\n"},
            {},
            "settings['save'] is not for averages",
        ),
    ],
)
def test_saving_that_makes_no_sense_is_refused(
    tmp_path: Path,
    files: dict[str, str | None],
    training: dict[str, str],
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`check` names the module and why its parameters cannot be left out."""
    write(tmp_path, files, **training)
    assert call(tmp_path, "check", "tiny", "--no-batches") == 2
    assert told in capsys.readouterr().err


def test_check_says_what_is_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Per module, how much is written once, and what has to come from elsewhere at every start."""
    write(tmp_path)
    assert call(tmp_path, "check", "tiny", "--no-batches") == 0
    out = capsys.readouterr().out
    assert "module trunk: 100 parameters, 44 trained; 56 others are saved once\n" in out
    assert "module head_a: 9 parameters, 9 trained\n" in out
    write(tmp_path, file_source(tmp_path))
    assert call(tmp_path, "check", "tiny", "--no-batches") == 0
    told = "others are not saved, because every start takes them from the file base (load_weights_from_ckp)\n"
    assert told in capsys.readouterr().out


@pytest.mark.slow
def test_sharded_modules_stay_whole(tmp_path: Path) -> None:
    """With fsdp, folders of shards hold all parameters, as they always did."""
    write(tmp_path, parallelism="fsdp")
    done = run_process(tmp_path, "--stop-after-epoch", "1", nproc=2)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / POOLS / "constant").exists()
    assert {*CONSTANT} <= {*read_any(tmp_path / POOLS / "last/trunk")}
