"""The run lock: at most one run is alive in an experiment, and a dead one blocks no other."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.errors import StateConflict
from pipeline.paths import ExperimentPaths
from pipeline.store.lock import RunLock, check_free, is_held, read_owner

HOLDER = """
import os, sys, time
from pathlib import Path
from pipeline.paths import ExperimentPaths
from pipeline.store.lock import RunLock

lock = RunLock(ExperimentPaths(Path(sys.argv[1]), "tiny"))
lock.acquire()
if sys.argv[2] == "fork" and os.fork() == 0:
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(60)
os.write(1, b"held\\n")
time.sleep(60)
"""


@pytest.fixture
def paths(tmp_path: Path) -> ExperimentPaths:
    """An experiment with an empty results folder."""
    found = ExperimentPaths(tmp_path, "tiny")
    found.results.mkdir(parents=True)
    return found


def start_holder(paths: ExperimentPaths, kind: str = "plain") -> subprocess.Popen[str]:
    """Start another process that holds the lock."""
    line = [sys.executable, "-c", HOLDER, str(paths.home), kind]
    return subprocess.Popen(line, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])


@pytest.fixture
def holder(paths: ExperimentPaths) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock."""
    process = start_holder(paths)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_lock_held_by_another_process_is_refused_with_its_owner(
    paths: ExperimentPaths, holder: subprocess.Popen[str]
) -> None:
    """The refusal comes at once and names host, pid and start of the other run."""
    started = time.monotonic()
    with pytest.raises(StateConflict) as raised:
        RunLock(paths).acquire()
    text = str(raised.value)
    assert time.monotonic() - started < 1
    assert f"pid {holder.pid}" in text
    assert socket.gethostname() in text
    assert f"since {time.strftime('%Y-')}" in text


def test_check_refuses_like_the_lock(paths: ExperimentPaths, holder: subprocess.Popen[str]) -> None:
    """A run is refused before it has looked at anything else."""
    with pytest.raises(StateConflict, match=f"pid {holder.pid}"):
        check_free(paths)


def test_refusal_leaves_the_owners_words_in_place(paths: ExperimentPaths, holder: subprocess.Popen[str]) -> None:
    """Trying to take the lock does not overwrite who holds it."""
    before = paths.lock_file.read_bytes()
    with pytest.raises(StateConflict):
        RunLock(paths).acquire()
    assert paths.lock_file.read_bytes() == before


def test_killed_holder_frees_the_lock_at_once(paths: ExperimentPaths, holder: subprocess.Popen[str]) -> None:
    """The kernel frees what a dead process held: nothing has to expire or be deleted."""
    holder.kill()
    holder.wait()
    assert not is_held(paths)
    lock = RunLock(paths)
    lock.acquire()
    assert read_owner(paths)["pid"] == os.getpid()
    lock.release()


def test_forked_child_does_not_keep_the_lock(paths: ExperimentPaths) -> None:
    """A loader worker that outlives its trainer does not block the next run."""
    process = start_holder(paths, "fork")
    assert process.stdout is not None
    words = {process.stdout.readline().strip(), process.stdout.readline().strip()}
    (child,) = (int(word) for word in words - {"held"})
    try:
        process.kill()
        process.wait()
        os.kill(child, 0)
        assert not is_held(paths)
    finally:
        os.kill(child, signal.SIGKILL)


def test_released_lock_can_be_taken_again(paths: ExperimentPaths) -> None:
    """The end of a run is the end of its lock."""
    first, second = RunLock(paths), RunLock(paths)
    first.acquire()
    assert is_held(paths)
    first.release()
    assert not is_held(paths)
    second.acquire()
    second.release()


def test_looking_creates_nothing(tmp_path: Path) -> None:
    """Asking about an experiment that has no results leaves no lock file behind."""
    paths = ExperimentPaths(tmp_path, "tiny")
    assert not is_held(paths)
    assert list(tmp_path.iterdir()) == []


def test_looking_changes_nothing(paths: ExperimentPaths) -> None:
    """Asking about a lock that was left behind keeps its content and its time."""
    paths.lock_file.write_text('{"pid": 1}')
    before = (paths.lock_file.read_bytes(), paths.lock_file.stat().st_mtime_ns)
    assert not is_held(paths)
    assert (paths.lock_file.read_bytes(), paths.lock_file.stat().st_mtime_ns) == before


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "\udcff"])
def test_owner_that_cannot_be_read_is_unknown(paths: ExperimentPaths, content: str) -> None:
    """A torn lock file is no reason to crash."""
    paths.lock_file.write_bytes(content.encode("utf-8", "surrogateescape"))
    assert read_owner(paths) == {}


LOOKER = """
import sys
from pathlib import Path
from pipeline.paths import ExperimentPaths
from pipeline.store.lock import is_held

print("looking", flush=True)
while True:
    is_held(ExperimentPaths(Path(sys.argv[1]), "tiny"))
"""


def test_looking_does_not_keep_a_run_from_starting(paths: ExperimentPaths) -> None:
    """However often others look whether a run is alive, one that starts meanwhile is not refused."""
    paths.lock_file.touch()
    with subprocess.Popen([sys.executable, "-c", LOOKER, str(paths.home)], stdout=subprocess.PIPE) as looker:
        assert looker.stdout is not None
        looker.stdout.readline()
        for _ in range(100):
            lock = RunLock(paths)
            lock.acquire()
            lock.release()
        looker.kill()
