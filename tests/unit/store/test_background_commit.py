"""Commits behind the loop: one at a time, errors at the next question, the last commit intact."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.errors import PipelineError
from pipeline.paths import ExperimentPaths
from pipeline.progress import TRAINING, Progress
from pipeline.store.background_commit import Commits
from pipeline.store.changes import Changes
from pipeline.store.lock import RunLock
from pipeline.store.store import ResultsStore, read_current_manifest
from pipeline.system.disk import Disk, bytes_writer, low_priority_executor


class SlowDisk(Disk):
    """Waits in front of each new file until it is let go, or fails there."""

    def __init__(self) -> None:
        self.may_go, self.fails = threading.Event(), False

    def write(self, path: Path, writer: object) -> object:  # type: ignore[override]
        if "generation_" in str(path):
            assert self.may_go.wait(10)
            if self.fails:
                raise PipelineError("No space left on device")
        return super().write(path, writer)  # type: ignore[arg-type]


@pytest.fixture
def disk() -> SlowDisk:
    return SlowDisk()


@pytest.fixture
def paths(tmp_path: Path) -> ExperimentPaths:
    found = ExperimentPaths(tmp_path, "x")
    for folder in (found.data, found.generations):
        folder.mkdir(parents=True)
    return found


@pytest.fixture
def commits(paths: ExperimentPaths, disk: SlowDisk) -> Iterator[Commits]:
    """Commits of an empty experiment."""
    lock = RunLock(paths)
    lock.acquire()
    found = Commits(ResultsStore(paths, disk, lock.claim), in_background=True)
    yield found
    disk.may_go.set()
    found.close()
    lock.release()


def submit(commits: Commits, epoch: int, then: object = None) -> None:
    content = bytes_writer(b"%d" % epoch)
    commits.begin(lambda: Changes({"x": content}), Progress(TRAINING, epoch), {})
    commits.complete(then or (lambda: None))  # type: ignore[arg-type]


def test_loop_goes_on_while_a_commit_is_written(commits: Commits, disk: SlowDisk, paths: ExperimentPaths) -> None:
    """Submitting returns at once; waiting returns when the commit is there."""
    submit(commits, 1)
    commits.poll()
    assert read_current_manifest(paths) is None
    disk.may_go.set()
    commits.wait()
    assert read_current_manifest(paths).progress.epoch == 1  # type: ignore[union-attr]


def test_what_follows_a_commit_happens_once_it_is_there(commits: Commits, disk: SlowDisk) -> None:
    """Values are published once they are permanent, and in the thread that asks."""
    threads: list[str] = []
    submit(commits, 1, lambda: threads.append(threading.current_thread().name))
    commits.poll()
    assert threads == []
    disk.may_go.set()
    commits.wait()
    commits.wait()
    assert threads == ["MainThread"]


def test_next_commit_waits_for_the_one_before(commits: Commits, disk: SlowDisk, paths: ExperimentPaths) -> None:
    """There is at most one in flight, and the state of the next is taken when it begins."""
    taken: list[int | None] = []
    submit(commits, 1)
    threading.Timer(0.2, disk.may_go.set).start()

    def changes() -> Changes:
        found = read_current_manifest(paths)
        taken.append(found.generation if found else None)
        return Changes()

    commits.begin(changes, Progress(TRAINING, 2), {})
    commits.complete(lambda: None)
    assert taken == [1]


def test_failed_commit_surfaces_at_the_next_question(commits: Commits, disk: SlowDisk, paths: ExperimentPaths) -> None:
    """A write that fails behind the loop is raised in it, and the commit before is intact."""
    disk.may_go.set()
    submit(commits, 1)
    commits.wait()
    disk.fails = True
    submit(commits, 2)
    commits.close()
    with pytest.raises(PipelineError, match="No space left"):
        commits.poll()
    assert read_current_manifest(paths).progress.epoch == 1  # type: ignore[union-attr]


def test_what_is_done_behind_the_training_gives_way_to_it() -> None:
    """The thread has a lower priority than the process; the process keeps its own."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    thread = low_priority_executor("test")
    niceness = thread.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).result()
    thread.shutdown()
    assert niceness == min(19, before + 10)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
