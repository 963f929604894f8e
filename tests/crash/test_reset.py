"""A reset killed at any operation leaves the old experiment whole, or none."""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.paths import ExperimentPaths
from pipeline.results.preparation import reset
from tests.support.experiments import tree, write_experiment
from tests.support.faults import CountingDisk, Killed, KillingDisk
from tests.support.running import run_inside, run_process

RESULTS = Path("experiment_results/tiny")


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data home whose experiment stands after epoch 0."""
    home = tmp_path_factory.mktemp("begun")
    write_experiment(home)
    run_inside(home, "--stop-after-epoch", "0")
    return home


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder in memory, which makes many copies cheap."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


def copy_of(begun: Path, home: Path) -> ExperimentPaths:
    shutil.copytree(begun, home, symlinks=True)
    return ExperimentPaths(home, "tiny")


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_reset_leaves_all_or_nothing(begun: Path, tmp_path: Path, stride: int) -> None:
    """Before the deciding rename everything is there; after it nothing is, and the next start finishes the job."""
    counting = CountingDisk()
    reset(copy_of(begun, tmp_path / "counted"), counting)
    before = {name: content for name, (content, _) in tree(begun / RESULTS).items() if name != "run.lock"}
    for kill_at in range(1, len(counting.operations) + 1, stride):
        paths = copy_of(begun, tmp_path / str(kill_at))
        with pytest.raises(Killed):
            reset(paths, KillingDisk(kill_at, "before"))
        gc.collect()
        if paths.results.exists():
            found = {name: content for name, (content, _) in tree(paths.results).items() if name != "run.lock"}
            assert found == before
        reset(paths, CountingDisk())
        assert not paths.results.exists()
        assert not paths.trash.exists()
        assert not any(paths.logs.iterdir())
    assert len(counting.operations) > 30


@pytest.mark.parametrize("words", [(), ("--auto",), ("--reset",)])
def test_start_after_a_killed_reset_begins_anew(begun: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    """Killed right after the rename, the experiment is gone for every mode and starts from the beginning."""
    paths = copy_of(begun, tmp_path / "home")
    (paths.logs / "old.txt").write_text("old")
    with pytest.raises(Killed):
        reset(paths, KillingDisk(4, "before"))
    gc.collect()
    assert not paths.results.exists()
    assert run_inside(paths.home, *words, "--stop-after-epoch", "0").epoch == 1
    assert not (paths.logs / "old.txt").exists()
    assert not paths.trash.exists()


def test_reset_spares_the_logs_of_the_current_torchrun(begun: Path, tmp_path: Path) -> None:
    """Log files that torchrun has open for this very run survive; those of earlier runs do not."""
    paths = copy_of(begun, tmp_path / "home")
    current, earlier = paths.logs / "torchrun/run_2", paths.logs / "torchrun/run_1"
    for folder in (current, earlier):
        (folder / "attempt_0/0").mkdir(parents=True)
        (folder / "attempt_0/0/stdout.log").write_text("line")
    error_file = current / "attempt_0/0/error.json"
    done = run_process(
        paths.home, "--reset", "--stop-after-epoch", "0", env={"TORCHELASTIC_ERROR_FILE": str(error_file)}
    )
    assert done.returncode == 0, done.stderr
    assert (current / "attempt_0/0/stdout.log").exists()
    assert not earlier.exists()


def test_reset_of_an_invalid_experiment_deletes_nothing(begun: Path, tmp_path: Path) -> None:
    """The new experiment is checked before the old one goes."""
    paths = copy_of(begun, tmp_path / "home")
    (paths.settings / "settings/training.json").write_text("{")
    before = tree(paths.results)
    done = run_process(paths.home, "--reset")
    assert done.returncode == 2
    assert tree(paths.results) == before
