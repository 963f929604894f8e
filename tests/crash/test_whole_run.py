"""The real pipeline, in one process, killed at its file operations and resumed."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.errors import PipelineError
from tests.support.compare import first_difference
from tests.support.experiments import tree, write_experiment
from tests.support.faults import CountingDisk, FailingDisk, Killed, KillingDisk
from tests.support.running import run_inside

DATA = Path("experiment_results/tiny/data")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder in memory: a campaign needs no disk to sync to."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


def undisturbed(home: Path) -> int:
    """Run to the end and return the number of file operations that took."""
    write_experiment(home)
    disk = CountingDisk()
    run_inside(home, disk=disk)
    return len(disk.operations)


def kill_everywhere(tmp_path: Path, stride: int, offset: int) -> int:
    reference = tmp_path / "reference"
    num_operations = undisturbed(reference)
    cases = range(1 + offset, num_operations + 1, stride)
    for kill_at in cases:
        home = tmp_path / str(kill_at)
        write_experiment(home)
        with pytest.raises(Killed):
            run_inside(home, disk=KillingDisk(kill_at, "torn"))
        gc.collect()
        assert run_inside(home, "--auto").is_finished
        assert first_difference(reference / DATA, home / DATA) is None, f"killed at operation {kill_at}"
        assert not list((home / "experiment_results/tiny/temp_data").iterdir())
    return len(cases)


def test_run_killed_at_some_operations_ends_the_same(tmp_path: Path) -> None:
    """A sample of all file operations of a run, from its first folder to its last commit."""
    assert kill_everywhere(tmp_path, stride=90, offset=3) > 10


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_run_killed_at_many_operations_ends_the_same(tmp_path: Path) -> None:
    """Many more operations of the same run."""
    print(f"{kill_everywhere(tmp_path, stride=12, offset=0)} kills survived")


def test_full_disk_in_mid_run_is_told_and_survived(tmp_path: Path) -> None:
    """A disk that is full from some moment on ends the run with the path; with space again it ends as it should."""
    reference, home = tmp_path / "reference", tmp_path / "full"
    fail_at = undisturbed(reference) // 2
    write_experiment(home)
    with pytest.raises(PipelineError, match=r"No space left on device(?s:.*)--resume"):
        run_inside(home, disk=FailingDisk(fail_at, for_ever=True))
    gc.collect()
    assert run_inside(home, "--resume").is_finished
    assert first_difference(reference / DATA, home / DATA) is None


def test_one_step_a_life(tmp_path: Path) -> None:
    """Killed after every single step and resumed each time, the experiment ends with the same bits."""
    reference, home = tmp_path / "reference", tmp_path / "steps"
    for folder in (reference, home):
        write_experiment(folder, training={"checkpoint_every_steps": 1})
    run_inside(reference)
    lives = 1
    while not _live(home).is_finished:
        lives += 1
    assert lives > 15
    assert first_difference(reference / DATA, home / DATA) is None


def _live(home: Path) -> object:
    """Run until one more commit is complete."""
    from pipeline.progress import Progress

    class OneCommit(CountingDisk):
        def rename(self, source: Path, target: Path) -> None:
            super().rename(source, target)
            self.has_committed = target.name == "state.json" or getattr(self, "has_committed", False)

        def write(self, path: Path, writer: object) -> object:  # type: ignore[override]
            if getattr(self, "has_committed", False):
                raise Killed
            return super().write(path, writer)  # type: ignore[arg-type]

    try:
        return run_inside(home, "--auto", disk=OneCommit())
    except Killed:
        gc.collect()
        return Progress()


def test_killed_right_after_the_last_commit_nothing_is_left_to_do(tmp_path: Path) -> None:
    """The next start takes no step, completes what follows a commit, and from then on changes nothing."""
    reference, home = tmp_path / "reference", tmp_path / "killed"
    write_experiment(reference)
    disk = CountingDisk()
    run_inside(reference, disk=disk)
    last = max(number for number, (_, path) in enumerate(disk.operations, 1) if path.name == "state.json")
    write_experiment(home)
    with pytest.raises(Killed):
        run_inside(home, disk=KillingDisk(last, "after"))
    gc.collect()
    assert run_inside(home, "--resume").is_finished
    assert first_difference(reference / DATA, home / DATA) is None
    assert len((home / "experiment_results/tiny/starts.jsonl").read_text().splitlines()) == 1
    before = tree(home)
    assert run_inside(home, "--resume").is_finished
    assert tree(home) == before
