"""Two runs that both believe to be alone: whoever has lost the experiment cannot write to it any more."""

from __future__ import annotations

import errno
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, TypeVar

import pytest

from pipeline.errors import PipelineError, StateConflict
from pipeline.paths import ExperimentPaths
from pipeline.store import lock as locks
from pipeline.store.lock import RunLock
from pipeline.system.disk import Disk
from tests.crash.life import Life, check, make
from tests.support.faults import CountingDisk

Result = TypeVar("Result")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder in memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


class NoLocks:
    """The lock of a file system that has none."""

    def acquire(self, **options: float) -> NoReturn:
        raise OSError(errno.ENOSYS, "Function not implemented")

    def release(self) -> None:
        return


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks, and little patience."""
    monkeypatch.setattr(locks, "_kernel_lock", lambda paths: NoLocks())
    monkeypatch.setattr(locks, "HEARTBEAT_SECONDS", 0.02)


class PausingDisk(CountingDisk):
    """Lets something else happen right before the n-th operation, as if the process had been stopped there."""

    def __init__(self, pause_at: int, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self._pause_at, self._meanwhile = pause_at, meanwhile

    def perform(self, operation: str, path: Path, action: Callable[[], Result]) -> Result:
        if len(self.operations) + 1 == self._pause_at:
            self._meanwhile()
        return super().perform(operation, path, action)


def take_over_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stride: int) -> int:
    """Stop a run before each of its operations, let a run on another host take over and end, and wake the first."""
    counting = CountingDisk()
    Life().live(make(tmp_path / "count"), counting)
    lost = 0
    for pause_at in range(1, len(counting.operations) + 1, stride):
        paths, first = make(tmp_path / str(pause_at)), Life()

        def take_over(paths: ExperimentPaths = paths, first: Life = first) -> None:
            for held in first.held:
                held._has_ended.set()
            # A stopped process shows no heartbeat, not even one that it had begun.
            for thread in threading.enumerate():
                if thread.name == "heartbeat":
                    thread.join(1)
            with monkeypatch.context() as patch:
                patch.setattr(locks.socket, "gethostname", lambda: "elsewhere")
                if paths.results.is_dir():
                    Life().live(paths, Disk())

        try:
            first.live(paths, PausingDisk(pause_at, take_over))
        except PipelineError:
            lost += 1
        # An empty folder in data/ is all that a sleeper may still add.
        check(paths, allows_empty_folders=True)
    return lost


@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_stopped_run_that_wakes_up_cannot_interfere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_flock: None, stride: int
) -> None:
    """Whatever a run was about to write when another took over, the other one's results stay as they are."""
    lost = take_over_everywhere(tmp_path, monkeypatch, stride)
    print(f"{lost} runs lost their experiment and stopped")
    assert lost > 10


def test_lost_run_says_who_has_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_flock: None) -> None:
    """The sentence names the other run, and the exit code is that of a conflict."""
    paths = make(tmp_path)
    paths.results.mkdir()
    lock = RunLock(paths)
    lock.acquire()
    lock._has_ended.set()
    monkeypatch.setattr(locks.socket, "gethostname", lambda: "elsewhere")
    other = RunLock(paths)
    other.acquire()
    with pytest.raises(StateConflict, match=r"taken over by pid \d+ on host elsewhere") as raised:
        lock.claim.check()
    assert raised.value.exit_code == 3
    other.claim.check()


def test_vanished_results_are_no_takeover(tmp_path: Path) -> None:
    """A folder that was deleted or unmounted is told as such."""
    paths = make(tmp_path)
    paths.results.mkdir()
    lock = RunLock(paths)
    lock.acquire()
    paths.results.rename(tmp_path / "elsewhere")
    with pytest.raises(PipelineError, match="has vanished") as raised:
        lock.claim.check()
    assert raised.value.exit_code == 1


def test_living_run_is_respected_without_kernel_locks(tmp_path: Path, no_flock: None) -> None:
    """On one host the process table tells that the other run is alive."""
    paths = make(tmp_path)
    paths.results.mkdir()
    first = RunLock(paths)
    first.acquire()
    with pytest.raises(StateConflict, match="is in use"):
        RunLock(paths).acquire()
    first.claim.check()
    assert locks.is_held(paths)
    first.release()
    assert not locks.is_held(paths)
    RunLock(paths).acquire()


def test_dead_run_on_this_host_frees_its_lock_without_kernel_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_flock: None
) -> None:
    """A process that is gone, or whose number belongs to another one now, holds nothing."""
    paths = make(tmp_path)
    paths.results.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(locks, "process_mark", lambda pid: "1")
        RunLock(paths).acquire()
    assert not locks.is_held(paths)
    RunLock(paths).acquire()


@pytest.mark.parametrize("has_flock", [True, False])
def test_living_run_on_another_host_is_respected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_flock: None, has_flock: bool
) -> None:
    """Signs of life are seen through the shared folder, even where the kernel's lock is not shared."""
    if has_flock:
        monkeypatch.setattr(locks, "_kernel_lock", lambda paths: type("Own", (NoLocks,), {"acquire": _succeed})())
    paths = make(tmp_path)
    paths.results.mkdir()
    first = RunLock(paths)
    first.acquire()
    monkeypatch.setattr(locks.socket, "gethostname", lambda: "elsewhere")
    with pytest.raises(StateConflict, match="is in use"):
        RunLock(paths).acquire()
    first.claim.check()


def _succeed(self: object, **options: float) -> None:
    return


def test_two_starters_at_the_same_moment_are_not_both_let_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_flock: None
) -> None:
    """Both have looked before either has claimed: one of them, or both, must go."""
    paths = make(tmp_path)
    paths.results.mkdir()
    monkeypatch.setattr(locks, "_is_alive", lambda folder, has_kernel_lock: False)
    counting = CountingDisk()
    RunLock(make(tmp_path / "count"), counting)._paths.results.mkdir()
    RunLock(ExperimentPaths(tmp_path / "count", paths.name), counting).acquire()
    for pause_at in range(1, len(counting.operations) + 1):
        second = RunLock(paths)
        first = RunLock(paths, PausingDisk(pause_at, second.acquire))
        still_held = 0
        for lock, begin in ((first, first.acquire), (second, second.claim.check)):
            try:
                begin()
                lock.claim.check()
                still_held += 1
            except PipelineError:
                continue
        assert still_held <= 1
