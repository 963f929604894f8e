"""`evaluate` under a real torchrun: the same bits at any number of processes, and one voice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline.__main__ import main
from pipeline.paths import ExperimentPaths
from pipeline.serialization.torch_files import load_tensors
from pipeline.store.generations import Generations
from tests.support.experiments import tree, write_experiment
from tests.support.running import SECONDS, BackgroundRun, environment, run_inside
from tests.unit.commands.test_evaluate import EXPERIMENT


def evaluate(home: Path, *words: str, nproc: int | None = None) -> subprocess.CompletedProcess[str]:
    torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={nproc}"] if nproc else []
    line = [sys.executable, *torchrun, "-m", "pipeline", "evaluate", *words, "--data-home", str(home)]
    return subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=SECONDS, check=False)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data home with an experiment that can predict, evaluated once before training."""
    home = tmp_path_factory.mktemp("begun")
    write_experiment(home, files=EXPERIMENT)
    run_inside(home, "--stop-after-epoch", "0")
    return home


@pytest.mark.parametrize("nproc", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_values_and_predictions_do_not_depend_on_the_number_of_processes(
    begun: Path, tmp_path: Path, nproc: int
) -> None:
    """Several processes write the file of one, to the last bit, and leave the data home alone."""
    before, words = tree(begun), ("tiny", "--split", "train", "--out")
    done = evaluate(begun, *words, f"{tmp_path}/many.pt", nproc=nproc)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss_a") == 1
    assert main(["evaluate", *words, f"{tmp_path}/one.pt", "--data-home", str(begun)]) == 0
    assert tree(begun) == before
    one, many = (load_tensors(tmp_path / f"{name}.pt") for name in ("one", "many"))
    assert many["values"] == one["values"]
    assert many["world_size"] == nproc
    for name, column in one["predictions"]["a"].items():
        assert torch.equal(column, many["predictions"]["a"][name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"), [(("--pool", "bets"), "has no pool 'bets'"), (("--split", "tset"), "invalid choice: 'tset'")]
)
def test_refusals_are_told_by_one_process(begun: Path, words: tuple[str, ...], said: str) -> None:
    """Under torchrun too, a refusal is one message without a stack trace of ours."""
    done = evaluate(begun, "tiny", *words, nproc=2)
    assert done.returncode == 1
    assert done.stderr.count(said) == 1
    assert "pipeline/evaluation" not in done.stderr


@pytest.mark.slow
def test_running_experiment_can_be_evaluated(tmp_path: Path) -> None:
    """While a run commits every step, each evaluation reads one whole commit, and the run never notices."""
    write_experiment(
        tmp_path,
        training={"checkpoint_every_steps": 1},
        files={"pymodules/early_stopper.py": _NEVER_STOPS},
    )
    generations = Generations(ExperimentPaths(tmp_path, "tiny"))
    with BackgroundRun(tmp_path) as run:
        run.wait_for(lambda: (generations.read_current_number() or 0) > 5)
        for pool in ("last", "best", "last"):
            done = evaluate(tmp_path, "tiny", "--pool", pool)
            assert done.returncode == 0, done.stderr
        assert run.process.poll() is None, run.text()


_NEVER_STOPS = """
    from pipeline.components import WeightedLossEarlyStopper

    early_stopper = WeightedLossEarlyStopper(max_epochs=100000)
"""
