"""A reset killed at any operation leaves the old experiment whole, or none."""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.lifecycle.reset import reset
from pipeline.paths import ExperimentPaths
from tests.support.experiments import tree, write_experiment
from tests.support.faults import CountingDisk, Killed, KillingDisk, PowerCutDisk
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


def contents(folder: Path) -> dict[str, bytes]:
    """Return all that makes up an experiment: not who held it, nor what a dead run had on its desk."""
    passing = ("run.lock", "temp_data", "status.json")
    return {name: content for name, (content, _) in tree(folder).items() if not name.startswith(passing)}


def check_all_or_nothing(paths: ExperimentPaths, before: dict[str, bytes]) -> None:
    if paths.results.exists():
        assert contents(paths.results) == before
    # A file system that keeps only half of a rename leaves nothing that could tell of the logs.
    knows_of_logs = paths.results.exists() or paths.trash.exists()
    reset(paths, CountingDisk())
    assert not paths.results.exists()
    assert not paths.trash.exists()
    assert not (knows_of_logs and any(paths.logs.iterdir()))


@pytest.mark.parametrize("stride", [16, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_reset_leaves_all_or_nothing(begun: Path, tmp_path: Path, stride: int) -> None:
    """Before the deciding rename everything is there; after it nothing is, and the next start finishes the job."""
    total, before = len(operations_of_a_reset(begun, tmp_path)), contents(begun / RESULTS)
    for kill_at in range(1, total + 1, stride):
        for moment in ("before", "after"):
            paths = copy_of(begun, tmp_path / f"{kill_at}_{moment}")
            with pytest.raises(Killed):
                reset(paths, KillingDisk(kill_at, moment))
            gc.collect()
            check_all_or_nothing(paths, before)
    print(f"{2 * len(range(1, total + 1, stride))} kills of a reset survived")


@pytest.mark.parametrize("stride", [16, pytest.param(1, marks=pytest.mark.slow)])
def test_reset_cut_off_from_power_leaves_all_or_nothing(begun: Path, tmp_path: Path, stride: int) -> None:
    """The same for power cuts, whatever they do to unsynced content and names."""
    total, before = len(operations_of_a_reset(begun, tmp_path)), contents(begun / RESULTS)
    for cut_at in range(1, total + 1, stride):
        paths = copy_of(begun, tmp_path / "cut")
        disk = PowerCutDisk(paths.home / "experiment_results", cut_at)
        with pytest.raises(Killed):
            reset(paths, disk)
        gc.collect()
        for how in ("data", "names", "creations"):
            left = ExperimentPaths(tmp_path / "left", "tiny")
            shutil.copytree(paths.home / "experiment_logs", left.home / "experiment_logs")
            disk.survivors(how, left.home / "experiment_results")
            check_all_or_nothing(left, before)
            shutil.rmtree(left.home)
        shutil.rmtree(paths.home)
    print(f"{3 * len(range(1, total + 1, stride))} power cuts of a reset survived")


def operations_of_a_reset(begun: Path, tmp_path: Path) -> list[tuple[str, Path]]:
    counting = CountingDisk()
    reset(copy_of(begun, tmp_path / "counted"), counting)
    assert len(counting.operations) > 30
    return counting.operations


@pytest.mark.parametrize("words", [(), ("--auto",), ("--reset",)])
def test_start_after_a_killed_reset_begins_anew(begun: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    """Killed right after the rename, the experiment is gone for every mode and starts from the beginning."""
    paths = copy_of(begun, tmp_path / "home")
    (paths.logs / "old.txt").write_text("old")
    operations = operations_of_a_reset(begun, tmp_path)
    rename = next(number for number, (_, path) in enumerate(operations, 1) if path.name == paths.trash.name)
    with pytest.raises(Killed):
        reset(paths, KillingDisk(rename, "after"))
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
