"""Nobody is locked out: whatever a start or a reset leaves behind, the next start begins or continues."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from pipeline.__main__ import main
from pipeline.distributed.processes import Processes
from pipeline.errors import PipelineError
from pipeline.lifecycle.reset import check_shared
from pipeline.paths import ExperimentPaths
from pipeline.progress import Progress
from pipeline.system.disk import Disk
from tests.support.faults import CountingDisk, FailingDisk, Killed, KillingDisk
from tests.support.running import BackgroundRun, run_inside

RESULTS = Path("experiment_results/tiny")


class TwoOfOneMind(Processes):
    """Rank zero of two, whose other rank sees and says the same."""

    def broadcast(self, value: Any) -> Any:
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value, value]


def hidden_entries(home: Path) -> list[str]:
    """Return what no user has made and no run needs, anywhere below a data home."""
    return sorted(path.relative_to(home).as_posix() for path in home.rglob(".*") if path.parent.name != "data")


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("has_results", [False, True])
def test_kill_while_processes_find_each_other_locks_nobody_out(home: Path, moment: str, has_results: bool) -> None:
    """Killed at any operation of the handshake, twice in a row, an experiment starts, and nothing is left over."""
    paths = ExperimentPaths(home, "tiny")
    if has_results:
        # What a kill leaves that came between the lock and the first commit.
        paths.results.mkdir(parents=True)
        paths.lock_file.write_text("{}")
    counting = CountingDisk()
    check_shared(paths, TwoOfOneMind(0, 2), counting)
    assert len(counting.operations) == 2
    for number in (1, 2, 1):
        with suppress(Killed):
            check_shared(paths, TwoOfOneMind(0, 2), KillingDisk(number, moment))
    assert run_inside(home, "--auto", "--stop-after-epoch", "0") == Progress("training", 1)
    assert hidden_entries(home) == []


def test_token_of_an_earlier_version_does_not_lock_out(home: Path) -> None:
    """Earlier versions wrote their token into the results, where it counted as foreign."""
    results = home / RESULTS
    results.mkdir(parents=True)
    (results / "run.lock").write_text("{}")
    (results / ".shared_0123").touch()
    run_inside(home, "--auto", "--stop-after-epoch", "0")
    assert hidden_entries(home) == []


ENTRIES = ["data", "generations", "temp_data", "pymodules", "settings", "state.json", "starts.jsonl", "run.lock"]


@pytest.mark.parametrize("name", [*ENTRIES, "status.json"])
@pytest.mark.parametrize("is_emptied", [False, True])
def test_missing_part_of_the_results_is_rebuilt_or_named(begun: Path, name: str, is_emptied: bool) -> None:
    """What the other parts still hold is rebuilt; what they do not is refused by name."""
    path = begun / RESULTS / name
    if path.is_dir():
        shutil.rmtree(path)
        if is_emptied:
            path.mkdir()
    elif path.exists():
        path.unlink()
        if is_emptied:
            path.touch()
    if name in ("generations", "pymodules", "settings"):
        with pytest.raises(PipelineError, match=name):
            run_inside(begun, "--resume")
        return
    assert run_inside(begun, "--resume", "--stop-after-epoch", "2") == Progress("training", 3)
    assert (begun / RESULTS / "data/module_ckps/best").is_dir()


def test_fsck_finds_no_damage_after_a_kill(begun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Between a commit and its names in data/ nothing is damaged, which is said with exit code 0."""
    (begun / RESULTS / "data/optim_ckps/trunk.pt").unlink()
    assert main(["fsck", "tiny", "--data-home", str(begun)]) == 0
    assert "the next start completes this" in capsys.readouterr().out


def test_damaged_commit_is_swept_once_a_newer_one_is_complete(begun: Path) -> None:
    """A run that fell back from a damaged commit and finished leaves nothing of it."""
    generations = begun / RESULTS / "generations"
    newest = max(generations.glob("*/manifest.json"), key=lambda path: int(path.parent.name))
    newest.write_text("")
    assert run_inside(begun, "--resume").is_finished
    assert not newest.parent.exists()
    assert main(["fsck", "tiny", "--data-home", str(begun)]) == 0


def test_failure_before_the_first_commit_names_a_way_that_works(home: Path) -> None:
    """A disk that is full at the first start advises --auto, and --auto then starts."""
    with pytest.raises(PipelineError, match="run again with --auto"):
        run_inside(home, disk=FailingDisk(9, errno.ENOSPC, for_ever=True))
    run_inside(home, "--auto", "--stop-after-epoch", "0")


def test_lock_file_that_cannot_be_written_is_told(home: Path) -> None:
    """The owner's note passes the same seam as everything else: an error there is a message, not a traceback."""
    counting = CountingDisk()
    run_inside(home, "--stop-after-epoch", "0", disk=counting)
    number = next(n for n, (_, path) in enumerate(counting.operations, 1) if path.name == "run.lock")
    shutil.rmtree(home / "experiment_results")
    with pytest.raises(PipelineError, match=r"Could not write .*run\.lock: No space left"):
        run_inside(home, disk=FailingDisk(number, errno.ENOSPC))


def test_error_folder_that_cannot_be_made_ends_nothing(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nobody needs the folder: a warning says that it is not there."""
    (home / "experiment_torchelastic_error_files").write_text("in the way")
    run_inside(home, "--stop-after-epoch", "0")
    assert "cannot be made" in capfd.readouterr().out


def test_missing_inodes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that has space, but no room for more files, is told apart from a full one."""
    monkeypatch.setattr(Disk, "free_inodes", lambda disk, path: 0)
    with pytest.raises(PipelineError, match="no inodes are free"):
        FailingDisk(1, errno.ENOSPC).write(tmp_path / "file", lambda file: None)


@contextmanager
def open_on_nfs(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[None]:
    """Play NFS, where a file of a name is open: removed, it becomes .nfs…, which cannot be removed."""
    unlink = Path.unlink

    def unlink_as_nfs(path: Path, missing_ok: bool = False) -> None:
        if path.name.startswith(".nfs"):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        if path.name == name and path.parent.name in ("tiny", ".reset+tiny"):
            path.rename(path.with_name(".nfs0001"))
        else:
            unlink(path, missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", unlink_as_nfs)
        yield


@pytest.mark.parametrize("name", ["train.log", "state.json"])
def test_open_files_on_nfs_do_not_block_a_reset(begun: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A reset completes beside a program that has a log or a result open; a later start removes the rest."""
    with open_on_nfs(monkeypatch, name):
        run_inside(begun, "--reset", "--stop-after-epoch", "0")
        run_inside(begun, "--resume", "--stop-after-epoch", "1")
    for path in begun.rglob(".nfs*"):
        path.unlink()
    assert run_inside(begun, "--resume").is_finished
    assert hidden_entries(begun) == []


@pytest.mark.slow
def test_resets_at_the_same_moment_end_as_one_success_and_refusals(begun: Path) -> None:
    """Two resets and a start at once: one of them runs, the others are refused with exit code 3 and the reason."""
    for _ in range(4):
        runs = [BackgroundRun(begun, mode, "--stop-after-epoch", "0") for mode in ("--reset", "--auto", "--reset")]
        codes = sorted(run.wait() for run in runs)
        said = "\n".join(run.text() for run in runs)
        assert set(codes) <= {0, 3}, said
        assert 0 in codes, said
        assert "Traceback" not in said
        reasons = ("is being reset by", "is in use", "was just started", "was just reset")
        assert sum(said.count(reason) for reason in reasons) >= codes.count(3), said
    assert run_inside(begun, "--auto").is_finished
    assert hidden_entries(begun) == []
