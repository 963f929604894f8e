"""The store under every fault at every single file operation, enumerated and not sampled."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.errors import PipelineError
from pipeline.paths import ExperimentPaths
from pipeline.store.store import ResultsStore
from pipeline.system.disk import Disk
from tests.crash.life import NUM_COMMITS, Life, check, make, survive
from tests.support.faults import CountingDisk, FailingDisk, Killed, KillingDisk, PowerCutDisk, StutteringDisk

POWER_CUTS = ["data", "zeros", "names", "creations", "replaced"]
REFUSALS = [
    (errno.ENOSPC, True),
    *(
        pytest.param(code, for_ever, marks=pytest.mark.slow)
        for code, for_ever in [
            (errno.EIO, False),
            (errno.ENOSPC, False),
            (errno.EDQUOT, True),
            (errno.EIO, True),
            (errno.EMFILE, False),
            (errno.EROFS, True),
        ]
    ),
]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder in memory: thousands of fsyncs need no disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


def count_operations(home: Path) -> int:
    paths, disk = make(home), CountingDisk()
    Life().live(paths, disk)
    check(paths)
    return len(disk.operations)


def die(paths: ExperimentPaths, disk: Disk, store_class: type[ResultsStore] = ResultsStore) -> int:
    """Live until the disk ends it; return the last commit that was promised."""
    life = Life(store_class)
    with pytest.raises(Killed):
        life.live(paths, disk)
    life.end()
    return life.promised


def kill_everywhere(tmp_path: Path, moment: str, store_class: type[ResultsStore] = ResultsStore) -> int:
    """Kill a life at each of its operations and let it live on; return how many there are."""
    total = count_operations(tmp_path / "whole")
    for kill_at in range(1, total + 1):
        paths = make_in(tmp_path / "case")
        survive(paths, die(paths, KillingDisk(kill_at, moment), store_class), store_class)
        shutil.rmtree(tmp_path / "case")
    return total


def make_in(home: Path) -> ExperimentPaths:
    home.mkdir()
    return make(home)


def cut_everywhere(
    tmp_path: Path,
    kinds: list[str],
    store_class: type[ResultsStore] = ResultsStore,
    disk_class: type[PowerCutDisk] = PowerCutDisk,
) -> int:
    """Cut the power after each operation and let it live on with what each kind of cut leaves."""
    total = count_operations(tmp_path / "whole")
    for cut_at in range(1, total + 1):
        paths = make_in(tmp_path / "case")
        disk = disk_class(paths.home / "experiment_results", cut_at)
        promised = die(paths, disk, store_class)
        for how in kinds:
            left = ExperimentPaths(tmp_path / "left", paths.name)
            left.home.mkdir()
            shutil.copytree(paths.home / "experiment_settings", left.home / "experiment_settings")
            disk.survivors(how, left.home / "experiment_results")
            survive(left, promised, store_class)
            shutil.rmtree(left.home)
        shutil.rmtree(paths.home)
    return total * len(kinds)


@pytest.mark.parametrize(
    "moment", [*(pytest.param(word, marks=pytest.mark.slow) for word in ("before", "after")), "torn"]
)
def test_kill_at_every_operation_loses_nothing(tmp_path: Path, moment: str) -> None:
    """Killed before, after or in the middle of any operation, the next run ends like an undisturbed one."""
    print(f"{kill_everywhere(tmp_path, moment)} kills {moment} an operation survived")


@pytest.mark.parametrize("kinds", [["names"], pytest.param(POWER_CUTS, marks=pytest.mark.slow)])
def test_power_cut_at_every_operation_loses_nothing(tmp_path: Path, kinds: list[str]) -> None:
    """Whatever was not synced is gone, content or names or both: every promised commit is still there."""
    print(f"{cut_everywhere(tmp_path, kinds)} power cuts survived")


def refusal(life: Life, paths: ExperimentPaths, disk: Disk) -> str:
    """Live with a disk that refuses something; return what is said, which is nothing once all is committed."""
    try:
        life.live(paths, disk)
    except PipelineError as error:
        life.end()
        return str(error)
    return ""


@pytest.mark.parametrize(("code", "for_ever"), REFUSALS)
def test_refused_operation_stops_with_last_commit_intact(tmp_path: Path, code: int, for_ever: bool) -> None:
    """A full disk or an I/O error at any operation is told with its path, and the next run ends as it should."""
    total = count_operations(tmp_path / "whole")
    for fail_at in range(1, total + 1):
        paths = make_in(tmp_path / "case")
        life, disk = Life(), FailingDisk(fail_at, code, for_ever=for_ever)
        told = refusal(life, paths, disk)
        assert not told or "The last commit is intact" in told
        assert str(disk.operations[fail_at - 1][1]) in told or life.promised == NUM_COMMITS
        assert code not in (errno.ENOSPC, errno.EDQUOT) or not told or " free)" in told
        survive(paths, life.promised)
        shutil.rmtree(paths.home)
    print(f"{total} operations refused with {errno.errorcode[code]}{' for ever' if for_ever else ''}, all survived")


@pytest.mark.parametrize("code", [errno.EINTR, pytest.param(errno.EAGAIN, marks=pytest.mark.slow)])
def test_interrupted_and_short_writes_are_invisible(tmp_path: Path, code: int) -> None:
    """An operation that is interrupted is done again, and a write that takes only a part goes on with the rest."""
    total = count_operations(tmp_path / "whole")
    for stutter_at in range(1, total + 1):
        paths = make_in(tmp_path / "case")
        Life().live(paths, StutteringDisk(stutter_at, code))
        check(paths)
        shutil.rmtree(paths.home)
    print(f"{total} operations interrupted with {errno.errorcode[code]}")


def double_faults(tmp_path: Path, stride: int) -> int:
    """Kill a life, kill its recovery at each operation, and once more; return the number of cases."""
    cases, total = 0, count_operations(tmp_path / "whole")
    for kill_at in range(stride // 2 + 1, total + 1, stride):
        for again in itertools.count(1):
            paths = make_in(tmp_path / "case")
            promised = die(paths, KillingDisk(kill_at, "torn"))
            is_over = not _dies_again(paths, KillingDisk(again, "after"))
            if not is_over:
                _dies_again(paths, KillingDisk(again, "before"))
                survive_at_least(paths, promised)
                cases += 1
            shutil.rmtree(paths.home)
            if is_over:
                break
    return cases


def _dies_again(paths: ExperimentPaths, disk: Disk) -> bool:
    """Let the next life die; it only has to come as far as its first commit."""
    life = Life()
    try:
        life.live(paths, disk)
    except Killed:
        return life.promised == life.found
    finally:
        life.end()
    return False


def survive_at_least(paths: ExperimentPaths, promised: int) -> None:
    life = Life()
    life.live(paths, Disk())
    assert life.found >= promised
    check(paths)


def test_second_kill_during_recovery_loses_nothing(tmp_path: Path) -> None:
    """Killed again at each operation of the recovery, and once more, it still ends like an undisturbed life."""
    cases = double_faults(tmp_path, stride=149)
    print(f"{cases} double faults survived")
    assert cases > 40


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_second_kill_at_every_operation_of_many_recoveries_loses_nothing(tmp_path: Path) -> None:
    """The same for many more first kills; DOUBLE_FAULT_STRIDE=1 takes every single one."""
    print(f"{double_faults(tmp_path, stride=int(os.environ.get('DOUBLE_FAULT_STRIDE', '7')))} double faults survived")


def test_failed_sync_is_not_tried_again(tmp_path: Path) -> None:
    """After a failed fsync the same file is never synced again: the kernel may have dropped its data."""
    disk = CountingDisk()
    Life().live(make(tmp_path / "count"), disk)
    syncs = [number for number, (kind, _) in enumerate(disk.operations, 1) if kind == "sync"]
    for number in syncs:
        failing = FailingDisk(number, errno.EIO)
        life = Life()
        with pytest.raises(PipelineError):
            life.live(make_in(tmp_path / str(number)), failing)
        life.end()
        assert failing.operations[number - 1] not in failing.operations[number:]
    assert len(syncs) > 3 * NUM_COMMITS
