"""The kernel is asked to sync all that a commit promises, and is believed when it says that it could not.

Faults at ``Disk.perform`` cannot see what happens inside it. These tests look at the real ``os.fsync``, and fail
for a program that leaves one of its syncs out.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.errors import PipelineError
from pipeline.system.disk import Disk
from tests.support.kernel import Sync, watched_kernel
from tests.support.running import run_inside

RESULTS = Path("experiment_results/tiny")


def test_everything_is_synced_before_it_is_promised(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a whole life with a stop and a resume, every commit is safe when it is made, and nothing comes too early."""
    with watched_kernel(monkeypatch, home / RESULTS) as kernel:
        run_inside(home, "--stop-after-epoch", "1")
        run_inside(home, "--resume")
    assert kernel.num_commits > 10
    assert kernel.violations == []


def without(is_left_out: Callable[[int], bool]) -> Callable[[Sync], Sync]:
    """Return a mutation of the program: it does not ask the kernel for some of its syncs."""

    def mutate(sync: Sync) -> Sync:
        return lambda descriptor: None if is_left_out(descriptor) else sync(descriptor)

    return mutate


def is_folder(descriptor: int) -> bool:
    return stat.S_ISDIR(os.fstat(descriptor).st_mode)


def is_results_folder(descriptor: int) -> bool:
    return is_folder(descriptor) and Path(f"/proc/self/fd/{descriptor}").readlink().name == "tiny"


def is_components_file(descriptor: int) -> bool:
    return not is_folder(descriptor) and "_data/" in str(Path(f"/proc/self/fd/{descriptor}").readlink())


@pytest.mark.parametrize(
    ("is_left_out", "found"),
    [
        (lambda descriptor: not is_folder(descriptor), "the content of"),
        (is_folder, "the name of"),
        (is_results_folder, "before the new state.json was safe"),
        (is_components_file, "the content of"),
    ],
    ids=["content", "folders", "folder of state.json", "files of components"],
)
def test_missing_sync_is_found(
    home: Path, monkeypatch: pytest.MonkeyPatch, is_left_out: Callable[[int], bool], found: str
) -> None:
    """The test above fails for a program that leaves out a kind of sync."""
    with watched_kernel(monkeypatch, home / RESULTS, without(is_left_out)) as kernel:
        run_inside(home, "--stop-after-epoch", "1")
    assert any(found in violation for violation in kernel.violations), kernel.violations[:3]


def syncs_after_a_failure(home: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the kernel fail to sync one committed file, and return which files it is asked for again afterwards."""
    fsync, failed = os.fsync, list[int]()
    again = list[str]()

    def fail_once(descriptor: int) -> None:
        inode, name = os.fstat(descriptor).st_ino, str(Path(f"/proc/self/fd/{descriptor}").readlink())
        if inode in failed:
            again.append(name)
        if not failed and name.endswith("optim_ckps/trunk.pt"):
            failed.append(inode)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail_once)
        run_inside(home, "--stop-after-epoch", "0")
    return again


def test_failed_sync_is_believed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may have dropped what it could not write: the run ends, and the file is not synced again."""
    with pytest.raises(PipelineError, match=r"Could not sync .*trunk\.pt: Input/output error"):
        syncs_after_a_failure(home, monkeypatch)
    assert not (home / RESULTS / "state.json").exists()


def test_sync_that_is_tried_again_is_found(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that tries a failed sync again, and believes the second answer, does not pass the test above."""
    perform = Disk.perform

    def perform_twice(disk: Disk, operation: str, path: Path, action: Callable[[], object]) -> object:
        def twice() -> object:
            try:
                return action()
            except OSError:
                time.sleep(0)
                return action()

        return perform(disk, operation, path, twice)

    monkeypatch.setattr(Disk, "perform", perform_twice)
    assert syncs_after_a_failure(home, monkeypatch) != []
