"""Results, logs and error files may lie in a home of their own, away from the settings."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.store.compare import first_difference
from tests.support.experiments import tree, write_experiment
from tests.support.running import environment, run_inside, run_process
from tests.support.verbs import call

ROOT = Path(__file__).parents[2]
DATA = Path("experiment_results/tiny/data")


@pytest.fixture
def homes(tmp_path: Path) -> tuple[Path, Path]:
    """A data home with settings only, and another folder that does not exist yet."""
    write_experiment(tmp_path / "settings")
    return tmp_path / "settings", tmp_path / "large disk"


@pytest.mark.slow
def test_everything_a_run_writes_lies_there(homes: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Under torchrun and hosted, stopped and continued by the printed line: the bits of an ordinary run."""
    home, results = homes
    before = tree(home)
    done = run_process(home, "--results-home", str(results), "--stop-after-epoch", "1", nproc=2)
    assert done.returncode == 0, done.stderr
    assert f"data home: {home}, results in {results}" in done.stdout
    line = done.stdout.split("next: ")[1].split("    (")[0]
    assert shlex.quote(str(results)) in line
    continued = subprocess.run(line, shell=True, cwd=ROOT, env=environment(), check=False)
    assert continued.returncode == 0
    assert tree(home) == before
    assert sorted(path.name for path in results.iterdir()) == [
        "experiment_logs",
        "experiment_results",
        "experiment_torchelastic_error_files",
    ]
    write_experiment(home / "ordinary")
    assert run_process(home / "ordinary", nproc=2).returncode == 0
    assert first_difference(results / DATA, home / "ordinary" / DATA) is None


def test_verbs_look_there(homes: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """status, compare, report, evaluate, replay, fsck, new --from and reset know the results by the same option."""
    home, results = homes
    run_inside(home, "--results-home", str(results), "--stop-after-epoch", "2")
    option = ("--results-home", str(results))
    for words in (
        ("status", "tiny"),
        ("compare", "tiny"),
        ("report", "tiny"),
        ("evaluate", "tiny", "--pool", "last"),
        ("replay", "tiny", "--epoch", "1", "--step", "2"),
        ("fsck", "tiny"),
        ("new", "variant", "--from", "tiny"),
    ):
        capsys.readouterr()
        assert call(home, *words, *option) == 0, (words, capsys.readouterr())
    run_inside(home, *option, "--reset", "--stop-after-epoch", "0")
    assert not (home / "experiment_results").exists()


@pytest.mark.slow
def test_proof_of_exactness_leaves_the_results_alone(homes: tuple[Path, Path]) -> None:
    """What verify-resume runs in a scratch folder never meets the experiment itself."""
    home, results = homes
    run_inside(home, "--results-home", str(results), "--stop-after-epoch", "1")
    before = tree(results / "experiment_results")
    line = [sys.executable, "-m", "pipeline", "verify-resume", "tiny", "--steps", "3", "--kills", "1"]
    where = ["--data-home", str(home), "--results-home", str(results)]
    done = subprocess.run([*line, *where], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert tree(results / "experiment_results") == before


def test_variable_means_the_same(homes: tuple[Path, Path]) -> None:
    """A job sets it once for all commands."""
    home, results = homes
    done = run_process(home, "--stop-after-epoch", "0", env={"GORIDEEPSTYLE_RESULTS_HOME": str(results)})
    assert done.returncode == 0, done.stderr
    assert (results / DATA).is_dir()
    assert not (home / "experiment_results").exists()
