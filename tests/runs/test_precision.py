"""Precision and graph options: killed in the middle of an epoch and resumed, every bit is as if nothing had been."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.errors import PipelineError
from pipeline.experiment import compilation
from pipeline.paths import ExperimentPaths
from pipeline.store.compare import first_difference, read_any
from pipeline.store.store import read_current_manifest
from tests.crash.experiment import EXPERIMENT, GATE, GATE_FOLDER, RESULTS, committed, prepare
from tests.support.experiments import FILES, write_experiment
from tests.support.running import BackgroundRun, run_inside, run_process
from tests.support.verbs import call

CHECKPOINTED = """
    from torch import nn
    from torch.utils.checkpoint import checkpoint


    class Trunk(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 8))

        def forward(self, inputs):
            return checkpoint(self.layers, inputs, use_reentrant=False)


    module = Trunk()
    settings = {"compile": False}
"""
TRUNK = "pymodules/modules/trunk.py"
COMPILED = FILES[TRUNK].replace('"frozen": False', '"compile": True')
BOTH = CHECKPOINTED.replace("False}", "True}")
TWO_EPOCHS = FILES["pymodules/early_stopper.py"].replace("max_epochs=3", "max_epochs=2")
# Some points of each epoch have gradients that fp16 cannot hold, whatever the scale has become.
LOUD = str(EXPERIMENT["pymodules/module_transforms/a.py"]).replace(
    "difference**2", 'difference**2 * (1 + 1e6 * (batch["idx"] % 20 == 7))'
)


def end_exactly(folder: Path, files: dict[str, str | None], nproc: int = 1, **training: str) -> ExperimentPaths:
    """Kill a run in the middle of its second epoch, resume it, compare it with one that was left alone, return it."""
    whole, killed = folder / "whole", folder / "killed"
    for home in (whole, killed):
        prepare(home, {"pymodules/early_stopper.py": TWO_EPOCHS, **files}, **training)
    one_thread = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    caches = [{"TORCHINDUCTOR_CACHE_DIR": str(folder / name), **one_thread} for name in ("cache", "empty_cache")]
    run_or_fail(whole, nproc, caches[0])
    gate = {GATE: f"training:0:{1 + 27 // nproc}", GATE_FOLDER: str(killed)}
    with BackgroundRun(killed, nproc=nproc if nproc > 1 else None, env={**caches[0], **gate}) as run:
        run.wait_for((killed / "reached").exists, seconds=120)
        run.wait_for(lambda: committed(killed)["progress"] == {"stage": "training", "epoch": 2, "step": 2})
        run.kill()
    # What is compiled again, from nothing, must be what was compiled before.
    run_or_fail(killed, nproc, caches[1], "--resume")
    assert first_difference(whole / RESULTS / "data", killed / RESULTS / "data") is None
    assert scale_of(whole) == scale_of(killed)
    return ExperimentPaths(killed, "tiny")


def run_or_fail(home: Path, nproc: int, env: dict[str, str], *words: str) -> None:
    done = run_process(home, *words, nproc=nproc if nproc > 1 else None, env=env)
    assert done.returncode == 0, done.stderr


def scale_of(home: Path) -> dict[str, float]:
    """Return the committed state of the gradient scaler: scale, growth tracker and how they change."""
    manifest = read_current_manifest(ExperimentPaths(home, "tiny"))
    assert manifest is not None
    found: dict[str, float] = manifest.run_state["grad_scaler"]
    return found


def weights(paths: ExperimentPaths) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = read_any(paths.data / "module_ckps/last/trunk.pt")
    return found


@pytest.mark.slow
def test_bf16_is_resumed_exactly(tmp_path: Path) -> None:
    """Under autocast the weights stay in full precision, and so does what is committed."""
    paths = end_exactly(tmp_path, {}, precision="bf16")
    assert weights(paths)["0.weight"].dtype == torch.float32


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_fp16_with_overflows_before_and_after_a_kill_is_resumed_exactly(tmp_path: Path, nproc: int) -> None:
    """The scale, what it grows by and the steps that were skipped are those of a run that was left alone."""
    files: dict[str, str | None] = {"pymodules/module_transforms/a.py": LOUD, TRUNK: CHECKPOINTED}
    paths = end_exactly(tmp_path, files, nproc, precision="fp16")
    steps = [read_any(paths.data / f"loss_reg_data/train/loss_a/step_data_{epoch}.npz") for epoch in (1, 2)]
    assert steps[0]["skipped"].any()
    assert steps[1]["skipped"][2:].any()
    assert not steps[1]["skipped"].all()
    assert scale_of(paths.home)["scale"] < 65536


@pytest.mark.slow
def test_recomputed_dropout_is_resumed_exactly(tmp_path: Path) -> None:
    """Gradient checkpointing draws the same numbers again in the backward pass, before and after a resume."""
    end_exactly(tmp_path, {TRUNK: CHECKPOINTED})


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_compiled_module_is_resumed_exactly(tmp_path: Path) -> None:
    """What torch has compiled for which batch first does not matter, and weights keep their plain names."""
    paths = end_exactly(tmp_path, {TRUNK: COMPILED})
    assert list((tmp_path / "cache").rglob("*.cpp")), "nothing was compiled"
    batch_norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert set(weights(paths)) == {"0.weight", *(f"1.{name}" for name in batch_norm)}


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_everything_at_once_is_resumed_exactly_and_understood_by_all_verbs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A compiled module that recomputes dropout under bf16 on two processes: exact, and nothing special to any verb."""
    paths = end_exactly(tmp_path, {TRUNK: BOTH}, nproc=2, precision="bf16")
    home = paths.home
    assert call(home, "check", "tiny") == 0
    assert call(home, "evaluate", "tiny", "--split", "val") == 0
    assert call(home, "export", "tiny:last:trunk", "--out", str(tmp_path / "trunk.pt")) == 0
    assert torch.load(tmp_path / "trunk.pt", weights_only=True)["trunk"].keys() == weights(paths).keys()
    assert call(home, "replay", "tiny", "--epoch", "2", "--step", "4") == 0
    assert "identical to the record" in capfd.readouterr().out
    assert call(home, "verify-resume", "tiny", "--steps", "4", "--kills", "1") == 0


@pytest.mark.slow
def test_weights_of_a_compiled_module_start_an_uncompiled_one(tmp_path: Path) -> None:
    """A compiled module's weight file is like any other."""
    write_experiment(tmp_path, files={TRUNK: COMPILED})
    run_inside(tmp_path, "--stop-after-epoch", "0")
    source = '{"exp_name": "tiny", "ckp_pool_name": "last", "module_name": "trunk"}'
    plain = FILES[TRUNK].replace('"frozen": False', f'"load_weights_from_exp": {source}')
    write_experiment(tmp_path, "plain", files={TRUNK: plain})
    run_inside(tmp_path, "--stop-after-epoch", "0", name="plain")
    pools = [tmp_path / "experiment_results" / name / "data/module_ckps" for name in ("tiny", "plain")]
    assert first_difference(pools[0] / "last", pools[1] / "init") is None


@pytest.mark.slow
def test_too_many_kinds_of_input_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than go on uncompiled from some batch on, which no resume could repeat, a run ends and says why."""
    monkeypatch.setattr(compilation, "MAX_KINDS_OF_INPUT", 1)
    write_experiment(tmp_path, files={TRUNK: COMPILED})
    with pytest.raises(PipelineError, match=r"modules/trunk\.py: .* at most 1 kinds(?s:.*)fix:"):
        run_inside(tmp_path)
