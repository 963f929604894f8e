"""The real pipeline in one process, killed and cut off at every one of its file operations, and resumed."""

from __future__ import annotations

import contextlib
import gc
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from pipeline.checkpoint.parts import PersistedParts
from pipeline.errors import PipelineError
from pipeline.lifecycle.mode import inspect_results
from pipeline.paths import ExperimentPaths
from pipeline.progress import Progress
from pipeline.store.compare import first_difference
from pipeline.store.generations import Generations
from pipeline.store.lock import RunLock
from pipeline.store.store import ResultsStore
from pipeline.store.verify import inspect
from pipeline.system.disk import Disk
from tests.support.experiments import tree, write_experiment
from tests.support.faults import CountingDisk, FailingDisk, Killed, KillingDisk, PowerCutDisk
from tests.support.running import run_inside

Result = TypeVar("Result")
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


class WatchedDisk(PowerCutDisk):
    """Shows what a kill or a power cut at each operation would leave, while the run goes on."""

    def __init__(self, top: Path, look_at: Callable[[WatchedDisk, str], None]) -> None:
        super().__init__(top, cut_at=1 << 60)
        self._look_at = look_at

    def perform(self, operation: str, path: Path, action: Callable[[], Result]) -> Result:
        result = super().perform(operation, path, action)
        self._look_at(self, operation)
        return result


class Aftermath:
    """Recovers what is left after each fault, and lets a real run go on from every state that is new.

    A resumed run reads nothing but the recovered folder. So two faults that lead to the same bytes lead to the same
    end, and one run stands for all of them.
    """

    def __init__(self, home: Path, scratch: Path, kinds: list[str], stride: int) -> None:
        self._home, self._scratch, self._kinds, self._stride = home, scratch, kinds, stride
        self._reference: Path | None = None
        self.cases, self.states = 0, dict[str, Path]()
        self._number = 0

    def look_at(self, disk: WatchedDisk, operation: str) -> None:
        """Called after each operation of the run that is being watched."""
        self._number += 1
        if self._number % self._stride == 0:
            for kind in self._kinds:
                self._case(disk, kind)

    def _case(self, disk: WatchedDisk, kind: str) -> None:
        home = self._scratch / f"{self._number}_{kind}"
        home.mkdir()
        if kind == "kill":
            for_people = shutil.ignore_patterns("*status.json*")
            shutil.copytree(self._home / "experiment_results", home / "experiment_results", ignore=for_people)
        else:
            disk.survivors(kind, home / "experiment_results")
        shutil.copytree(self._home / "experiment_settings", home / "experiment_settings")
        key = _recovered(ExperimentPaths(home, "tiny"))
        self.cases += 1
        if key in self.states:
            shutil.rmtree(home)
        else:
            self.states[key] = home

    def run_on(self, reference: Path) -> None:
        """Let a real run go on from every distinct state and compare its end with the undisturbed one."""
        for home in self.states.values():
            assert run_inside(home, "--auto").is_finished
            assert first_difference(reference / DATA, home / DATA) is None, home.name
            paths = ExperimentPaths(home, "tiny")
            assert not list(paths.temp_data.iterdir())
            inspection = inspect(paths, PersistedParts.is_needed)
            assert inspection.is_clean, inspection


def _recovered(paths: ExperimentPaths) -> str:
    """Recover as the next run would and return all that this run would read."""
    if not inspect_results(paths).exists:
        return "nothing"
    lock = RunLock(paths)
    lock.acquire()
    store = ResultsStore(paths, Disk(), lock.claim)
    store.recover(PersistedParts.is_needed)
    lock.release()
    found = inspect(paths, PersistedParts.is_needed)
    assert found.is_clean, found
    state = {name: value for name, value in store.current.run_state.items() if name != "time"}
    digests = {path: entry.digest for path, entry in Generations(paths).all_files(store.current).items()}
    return repr((store.current.progress, state, digests, store.current.copies))


def survive_everything(tmp_path: Path, kinds: list[str], stride: int) -> Aftermath:
    reference, home = tmp_path / "reference", tmp_path / "watched"
    write_experiment(reference)
    run_inside(reference)
    write_experiment(home)
    (home / "experiment_results").mkdir()
    aftermath = Aftermath(home, tmp_path, kinds, stride)
    run_inside(home, disk=WatchedDisk(home / "experiment_results", aftermath.look_at))
    aftermath.run_on(reference)
    print(f"{aftermath.cases} faults in a whole run, {len(aftermath.states)} distinct states: all ended the same")
    return aftermath


def test_run_ended_at_some_operations_ends_the_same(tmp_path: Path) -> None:
    """A sample of all file operations of a run, killed and cut off from power."""
    aftermath = survive_everything(tmp_path, ["kill", "names"], stride=23)
    assert aftermath.cases > 100
    assert len(aftermath.states) > 10


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_run_ended_at_every_operation_ends_the_same(tmp_path: Path) -> None:
    """Every single file operation, from the first folder to the last commit, and every kind of power cut."""
    aftermath = survive_everything(tmp_path, ["kill", "data", "zeros", "names", "creations", "replaced"], stride=1)
    assert aftermath.cases > 5000


@pytest.mark.parametrize("share", [0.02, 0.4, 0.97])
def test_run_killed_in_the_middle_of_a_write_ends_the_same(tmp_path: Path, share: float) -> None:
    """The process itself dies, with half a file written, while threads are at work."""
    reference, home = tmp_path / "reference", tmp_path / "killed"
    kill_at = int(undisturbed(reference) * share)
    write_experiment(home)
    with pytest.raises(Killed):
        run_inside(home, disk=KillingDisk(kill_at, "torn"))
    gc.collect()
    assert run_inside(home, "--auto").is_finished
    assert first_difference(reference / DATA, home / DATA) is None


def test_full_disk_in_mid_run_is_told_and_survived(tmp_path: Path) -> None:
    """A disk that is full from some moment on ends the run with the path; with space again it ends as it should."""
    reference, home = tmp_path / "reference", tmp_path / "full"
    fail_at = undisturbed(reference) // 2
    write_experiment(home)
    with pytest.raises(PipelineError, match=r"No space left on device(?s:.*)--auto"):
        run_inside(home, disk=FailingDisk(fail_at, for_ever=True))
    gc.collect()
    assert run_inside(home, "--auto").is_finished
    assert first_difference(reference / DATA, home / DATA) is None


@pytest.mark.parametrize("in_background", [True, False])
def test_commits_in_the_background_change_no_bit(tmp_path: Path, in_background: bool) -> None:
    """Written behind the loop or in front of it, the results are the same."""
    reference, home = tmp_path / "reference", tmp_path / "other"
    write_experiment(reference)
    write_experiment(home, training={"checkpoint_every_steps": 1, "checkpoint_in_background": in_background})
    run_inside(reference)
    run_inside(home)
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
    print(f"{lives} lives")
    assert lives > 15
    assert first_difference(reference / DATA, home / DATA) is None


class OneCommit(CountingDisk):
    """Dies at the first write after a commit."""

    has_committed = False

    def perform(self, operation: str, path: Path, action: Callable[[], Result]) -> Result:
        if self.has_committed and operation == "create":
            raise Killed
        result = super().perform(operation, path, action)
        self.has_committed |= operation == "rename to" and path.name == "state.json"
        return result


def _live(home: Path) -> Progress:
    """Run until one more commit is complete."""
    with contextlib.suppress(Killed):
        return run_inside(home, "--auto", disk=OneCommit())
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
