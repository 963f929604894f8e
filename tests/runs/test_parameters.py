"""Parameters from the command line to the training, its results and every tracker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.experiments import FILES, write_experiment
from tests.support.mirrors import mlflow_parameters, tensorboard_parameters, wandb_parameters
from tests.support.running import run_inside, run_process
from tests.support.tracked import LOGGING
from tests.support.verbs import call

PARAMETERS = {"lr": 0.01, "noise": {"std": 0.1}, "name": "first"}
USING = {
    "settings/parameters.json": json.dumps(PARAMETERS),
    "pymodules/optim_sched/trunk.py": FILES["pymodules/optim_sched/trunk.py"]
    .replace("import TorchScheduler", "import parameters, TorchScheduler")
    .replace("lr=0.01", "lr=parameters.lr"),
    # Read in loader workers, by a file that the others import.
    "pymodules/utils/points.py": FILES["pymodules/utils/points.py"]
    .replace("import BaseDataset", "import BaseDataset, parameters")
    .replace("np.float32(noise)", "np.float32(noise) * np.float32(parameters.noise.std)"),
    "pymodules/dataloaders/a.py": FILES["pymodules/dataloaders/a.py"].replace('"num_workers": 0', '"num_workers": 1'),
}


def test_rate_from_the_command_line_is_trained_with_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two variants of one experiment differ in one row of the comparison, and in nothing else."""
    write_experiment(tmp_path, files=USING)
    assert call(tmp_path, "new", "variant", "--from", "tiny", "--set", "parameters.lr=0.5") == 0
    for name in ("tiny", "variant"):
        run_inside(tmp_path, "--stop-after-epoch", "1", name=name)
    log = (tmp_path / "experiment_logs/variant/train.log").read_text()
    assert "parameters: lr 0.5, noise.std 0.1, name first" in log
    assert "learning rates of trunk: trunk 5.000e-01" in log
    capsys.readouterr()
    assert call(tmp_path, "compare", "tiny", "variant") == 0
    differs = capsys.readouterr().out.split("differs")[1].splitlines()[1:]
    assert [line.split() for line in differs] == [["parameters.lr", "0.01", "0.5"]]
    assert call(tmp_path, "status", "variant") == 0
    assert "parameters lr 0.5, noise.std 0.1, name first" in capsys.readouterr().out


def test_every_tracker_shows_in_what_two_variants_differ(tmp_path: Path) -> None:
    """TensorBoard's HPARAMS, the config of W&B and the parameters of MLflow have what --set has changed."""
    for name, rate in {"tiny": 0.02, "variant": 0.5}.items():
        write_experiment(tmp_path, name, files=USING, logging=LOGGING)
        logs = tmp_path / "experiment_logs" / name
        sets = ["--set", f"parameters.lr={rate}", "--set", "parameters.noise.std=0"]
        run_inside(tmp_path, *sets, "--stop-after-epoch", "0", name=name)
        expected = {"lr": rate, "noise.std": 0, "name": "first"}
        assert tensorboard_parameters(logs) == expected
        assert wandb_parameters(logs) == expected
        assert mlflow_parameters(logs) == {name: str(value) for name, value in expected.items()}


def test_parameters_are_frozen_with_the_settings(tmp_path: Path) -> None:
    """A resume runs with the parameters of its start, and refuses others."""
    folder = write_experiment(tmp_path, files=USING)
    run_inside(tmp_path, "--set", "parameters.lr=0.02", "--stop-after-epoch", "1")
    (folder / "settings/parameters.json").write_text("{}")
    done = run_process(tmp_path, "--auto", "--set", "parameters.lr=0.03")
    assert done.returncode == 2
    assert "parameters.lr=0.03 would change settings that are frozen" in done.stderr
    done = run_process(tmp_path, "--auto", "--set", "parameters.lr=0.02")
    assert done.returncode == 0, done.stderr
    assert "parameters: lr 0.02" in done.stdout + done.stderr


def test_missing_parameter_is_told_with_the_line_that_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The sentence names the author's file and line, the name and the nearest one."""
    files = {**USING, "settings/parameters.json": '{"lrate": 1, "noise": {"std": 1}, "name": ""}'}
    write_experiment(tmp_path, files=files)
    assert call(tmp_path, "check", "tiny") == 2
    said = capsys.readouterr().err
    line = "return AdamW"
    number = next(
        n for n, text in enumerate(USING["pymodules/optim_sched/trunk.py"].strip().splitlines(), 1) if line in text
    )
    assert f"optim_sched/trunk.py:{number}: create_optimizer must work" in said
    assert "must have parameters.lr, but parameters has lrate, noise, name. Did you mean 'lrate'?" in said
    assert "the modules are" not in said


def test_check_names_unused_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A value that no file reads is a warning, not an error."""
    write_experiment(tmp_path, files=USING)
    assert call(tmp_path, "check", "tiny", "--no-batches") == 0
    said = capsys.readouterr().out
    assert "settings/parameters.json: no pymodule uses name\nok" in said


def test_launch_sets_parameters_per_experiment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of several experiments each gets its own changes and the common ones; other names are refused."""
    for name in ("a", "b"):
        write_experiment(tmp_path, name, files=USING)
    sets = ["--set", "a:parameters.lr=1", "--set", "training.seed=5", "--set", "b:parameters.lr=2"]
    assert call(tmp_path, "launch", "a", "b", "--nproc", "1", "--print", *sets) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "training_pipeline" in line]
    assert [line.split("--set ", 1)[1].split(" --auto")[0] for line in lines] == [
        "parameters.lr=1 --set training.seed=5",
        "training.seed=5 --set parameters.lr=2",
    ]
    assert call(tmp_path, "launch", "a", "--print", "--set", "c:parameters.lr=1") == 2
    assert "'c' is not started here" in capsys.readouterr().err
    assert call(tmp_path, "slurm", "a", "--time", "10", "--print", "--set", "parameters.lr=1") == 0
    assert "--auto --set parameters.lr=1" in capsys.readouterr().out
