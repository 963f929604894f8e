"""The store under a fault at every single file operation."""

from __future__ import annotations

import errno
import itertools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.errors import DamagedResults, PipelineError
from pipeline.paths import ExperimentPaths
from pipeline.progress import FINISHED, TRAINING, Progress
from pipeline.results.manifest import read_sealed_json, sealed_json
from pipeline.results.store import ResultsStore
from pipeline.runtime.durable import Changes, Digest, Disk, bytes_writer
from tests.support.faults import CountingDisk, FailingDisk, Killed, KillingDisk

NUM_COMMITS = 5


def make(home: Path) -> ExperimentPaths:
    paths = ExperimentPaths(home, "store")
    for folder in (paths.data, paths.temp_data, paths.generations):
        folder.mkdir(parents=True, exist_ok=True)
    return paths


def changes(number: int) -> Changes:
    """Return a commit with everything a commit can have; its content tells its number."""

    def save(folder: Path) -> None:
        (folder / "inner").mkdir()
        (folder / "inner" / "state.json").write_text(json.dumps(number))

    dropped = {f"pools/epoch_{number - 2}/m.pt"} if number > 2 else set()
    segments = {f"running/{number}": bytes_writer(b"segment")} if number % 2 else {}
    return Changes(
        files={"pools/last/m.pt": bytes_writer(str(number).encode() * 1000), **segments},
        folders={"component": save},
        same_as={f"pools/epoch_{number}/m.pt": "pools/last/m.pt"},
        removed=dropped | ({f"running/{number - 1}"} if number % 2 == 0 else set()),
        sealed={f"records/step_data_{number}.npz": bytes_writer(b"sealed %d" % number)},
        is_partial=number == 3,
    )


def place(number: int) -> Progress:
    return Progress(FINISHED if number == NUM_COMMITS else TRAINING, number)


def work(paths: ExperimentPaths, disk: Disk) -> None:
    """Recover if there is anything, then commit what is left to commit."""
    store = ResultsStore(paths, disk)
    if paths.state_file.exists() or any(paths.generations.iterdir()):
        store.recover(lambda path: path.startswith(("pools/last", "component")))
    else:
        # A start that never committed begins with empty folders.
        shutil.rmtree(paths.temp_data)
        make(paths.home)
    for number in range(store.current.progress.epoch + 1, NUM_COMMITS + 1):
        store.commit(changes(number), place(number), {"number": number})


def survey(paths: ExperimentPaths) -> dict[str, bytes]:
    """Return everything below the results but the manifests, whose generation numbers may differ."""
    files = sorted(path for path in paths.results.rglob("*") if path.is_file())
    return {
        path.relative_to(paths.results).as_posix(): path.read_bytes() for path in files if paths.data in path.parents
    } | {f"stray: {path.relative_to(paths.results)}": b"" for path in files if paths.temp_data in path.parents}


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder in memory: thousands of fsyncs need no disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], int]:
    """What an undisturbed run leaves, and the number of its operations."""
    paths, disk = make(tmp_path_factory.mktemp("undisturbed")), CountingDisk()
    work(paths, disk)
    return survey(paths), len(disk.operations)


def check_view(paths: ExperimentPaths) -> None:
    """Whatever happened, data/ shows one commit whole once recovery has run."""
    number = json.loads((paths.data / "component/inner/state.json").read_text())
    assert (paths.data / "pools/last/m.pt").read_bytes() == str(number).encode() * 1000


@pytest.mark.parametrize("moment", ["before", "after", "torn"])
def test_kill_at_every_operation_loses_nothing(
    tmp_path: Path, expected: tuple[dict[str, bytes], int], moment: str
) -> None:
    """Killed before, after or in the middle of any operation, the next run ends like an undisturbed one."""
    whole, num_operations = expected
    for kill_at in range(1, num_operations + 1):
        paths = make(tmp_path / str(kill_at))
        with pytest.raises(Killed):
            work(paths, KillingDisk(kill_at, moment))
        work(paths, Disk())
        check_view(paths)
        assert survey(paths) == whole, f"killed {moment} operation {kill_at}"
    print(f"{num_operations} kills {moment} an operation survived")


def test_kill_during_recovery_loses_nothing(tmp_path: Path, expected: tuple[dict[str, bytes], int]) -> None:
    """Killed again at each operation of the recovery, and once more, it still ends like an undisturbed run."""
    whole, num_operations = expected
    cases = 0
    for kill_at in range(num_operations // 2, num_operations, 7):
        for again in itertools.count(1):
            paths = make(tmp_path / f"{kill_at}_{again}")
            with pytest.raises(Killed):
                work(paths, KillingDisk(kill_at, "after"))
            if not _is_killed(lambda p=paths, n=again: _recover(p, KillingDisk(n, "after"))):
                break
            _is_killed(lambda p=paths, n=again: _recover(p, KillingDisk(n, "before")))
            work(paths, Disk())
            assert survey(paths) == whole
            cases += 1
    assert cases > 50


def _recover(paths: ExperimentPaths, disk: Disk) -> None:
    if paths.state_file.exists():
        ResultsStore(paths, disk).recover(lambda path: True)


def _is_killed(action: Callable[[], None]) -> bool:
    try:
        action()
    except Killed:
        return True
    return False


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EMFILE])
@pytest.mark.parametrize("for_ever", [False, True])
def test_refused_operation_stops_with_last_commit_intact(
    tmp_path: Path, expected: tuple[dict[str, bytes], int], code: int, for_ever: bool
) -> None:
    """Full disk, I/O error, too many open files: told with the path wherever it happens; the next run ends well."""
    whole, num_operations = expected
    for fail_at in range(1, num_operations + 1, 3):
        paths = make(tmp_path / str(fail_at))
        disk = FailingDisk(fail_at, code, for_ever=for_ever)
        with pytest.raises(PipelineError, match="last commit is intact") as caught:
            work(paths, disk)
        assert str(disk.operations[fail_at - 1][1]) in str(caught.value)
        work(paths, Disk())
        assert survey(paths) == whole


def test_failed_sync_is_not_tried_again(tmp_path: Path, expected: tuple[dict[str, bytes], int]) -> None:
    """After a failed fsync the same file is never synced again: the kernel may have dropped its data."""
    disk = CountingDisk()
    work(make(tmp_path / "count"), disk)
    first_sync = next(number for number, (kind, _) in enumerate(disk.operations, 1) if kind == "sync")
    failing = FailingDisk(first_sync, errno.EIO)
    with pytest.raises(PipelineError):
        work(make(tmp_path / "fail"), failing)
    assert [kind for kind, path in failing.operations if path == failing.operations[first_sync - 1][1]].count(
        "sync"
    ) == 1


@pytest.mark.parametrize("damage", [b"", b"{", b'{"format": 1}', b"\xff\xfe", b"[]", b"null"])
def test_damaged_state_file_falls_back_to_an_intact_commit(tmp_path: Path, damage: bytes) -> None:
    """A torn or foreign state file is survived: the newest commit that is intact goes on."""
    paths = make(tmp_path)
    work(paths, Disk())
    before = survey(paths)
    paths.state_file.write_bytes(damage)
    store = ResultsStore(paths, Disk())
    store.recover(lambda path: True)
    assert store.current.progress == place(NUM_COMMITS)
    assert survey(paths) == before


@pytest.mark.parametrize("how", ["flip", "truncate", "remove"])
def test_damaged_newest_commit_falls_back_to_the_one_before(tmp_path: Path, how: str) -> None:
    """A needed file of the newest commit that is damaged makes the run go on from the commit before."""
    paths = make(tmp_path)
    work(paths, Disk())
    newest = paths.generations / str(NUM_COMMITS) / "pools/last/m.pt"
    _damage(newest, paths.data / "pools/last/m.pt", how)
    store = ResultsStore(paths, Disk())
    store.recover(lambda path: path.startswith("pools/last"))
    assert store.current.progress.epoch == NUM_COMMITS - 1
    check_view(paths)
    store.commit(changes(NUM_COMMITS), place(NUM_COMMITS), {})
    check_view(paths)


def _damage(stored: Path, shown: Path, how: str) -> None:
    if how == "remove":
        stored.unlink()
        shown.unlink()
    elif how == "truncate":
        with stored.open("r+b") as file:
            file.truncate(10)
    else:
        content = bytearray(stored.read_bytes())
        content[5] ^= 1
        with stored.open("r+b") as file:
            file.write(content)


def test_partial_commit_keeps_an_older_one_to_fall_back_to(tmp_path: Path) -> None:
    """Weights that two commits share may be damaged: the commit before both is still there."""
    paths = make(tmp_path)
    store = ResultsStore(paths, Disk())
    store.commit(Changes({"w": bytes_writer(b"first")}), Progress(TRAINING, 1), {})
    store.commit(Changes({"w": bytes_writer(b"second")}), Progress(TRAINING, 2), {})
    store.commit(Changes({"v": bytes_writer(b"verdict")}, is_partial=True), Progress(TRAINING, 3), {})
    _damage(paths.generations / "2/w", paths.data / "w", "flip")
    store = ResultsStore(paths, Disk())
    store.recover(lambda path: True)
    assert store.current.progress.epoch == 1
    assert (paths.data / "w").read_bytes() == b"first"


def test_nothing_intact_is_refused_and_nothing_deleted(tmp_path: Path) -> None:
    """With both commits damaged the store refuses, names the files and leaves all of them."""
    paths = make(tmp_path)
    work(paths, Disk())
    for manifest in paths.generations.glob("*/manifest.json"):
        manifest.write_bytes(b"torn")
    before = {path: path.read_bytes() for path in paths.results.rglob("*") if path.is_file()}
    with pytest.raises(
        DamagedResults, match=r"(?s)generations/5/manifest.json, generations/4/manifest.json\..*Nothing was deleted"
    ):
        ResultsStore(paths, Disk()).recover(lambda path: True)
    assert before == {path: path.read_bytes() for path in paths.results.rglob("*") if path.is_file()}


def test_deleted_generations_are_taken_back_from_data(tmp_path: Path) -> None:
    """A file that is gone from generations/ but intact in data/ is not lost."""
    paths = make(tmp_path)
    work(paths, Disk())
    (paths.generations / str(NUM_COMMITS) / "pools/last/m.pt").unlink()
    store = ResultsStore(paths, Disk())
    store.recover(lambda path: path.startswith("pools/last"))
    assert store.current.progress == place(NUM_COMMITS)


def test_deleted_pool_that_nobody_needs_does_not_block(tmp_path: Path) -> None:
    """An older pool deleted everywhere to save space is gone, and the run goes on."""
    paths = make(tmp_path)
    work(paths, Disk())
    (paths.generations / str(NUM_COMMITS - 1) / "pools/last/m.pt").unlink()
    (paths.data / f"pools/epoch_{NUM_COMMITS - 1}/m.pt").unlink()
    store = ResultsStore(paths, Disk())
    store.recover(lambda path: path.startswith("pools/last"))
    assert store.current.progress == place(NUM_COMMITS)


def test_file_that_cannot_be_read_falls_back_to_the_commit_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An I/O error while reading the newest commit is damage like any other."""
    paths, digest_of = make(tmp_path), Digest.of
    work(paths, Disk())

    def fail(path: Path) -> Digest:
        if path.name == "m.pt" and f"/{NUM_COMMITS}/" in str(path):
            raise OSError(errno.EIO, "Input/output error")
        return digest_of(path)

    monkeypatch.setattr(Digest, "of", fail)
    store = ResultsStore(paths, Disk())
    store.recover(lambda path: path.startswith("pools/last"))
    assert store.current.progress == place(NUM_COMMITS - 1)


def forge(paths: ExperimentPaths, name: str, **values: object) -> None:
    """Change a sealed document and seal it again."""
    document = read_sealed_json(paths.generations / str(NUM_COMMITS) / name)
    (paths.generations / str(NUM_COMMITS) / name).write_bytes(sealed_json({**(document or {}), **values}))


@pytest.mark.parametrize("name", ["../../../../canary", "/canary", "a/../../x", "", "."])
@pytest.mark.parametrize("side", ["shown", "stored"])
def test_manifest_that_leads_out_of_the_results_is_not_followed(tmp_path: Path, name: str, side: str) -> None:
    """A forged manifest makes us neither overwrite nor delete anything outside."""
    paths = make(tmp_path / "home")
    work(paths, Disk())
    (tmp_path / "canary").write_text("alive")
    entry = ["5/pools/last/m.pt" if side == "shown" else name, 1000, "0"]
    forge(paths, "manifest.json", files={name if side == "shown" else "pools/x": entry})
    store = ResultsStore(paths, Disk())
    store.recover(lambda path: path.startswith("pools/last"))
    assert store.current.progress == place(NUM_COMMITS - 1)
    assert (tmp_path / "canary").read_text() == "alive"


def test_ring_of_sealed_lists_ends(tmp_path: Path) -> None:
    """Lists that name each other as the one before are damage, not an endless loop."""
    paths = make(tmp_path)
    work(paths, Disk())
    forge(paths, "sealed.json", previous=[f"{NUM_COMMITS}/sealed.json", 1, "0"])
    ResultsStore(paths, Disk()).recover(lambda path: False)


def test_newer_format_is_refused(tmp_path: Path) -> None:
    """Results written by a newer version are refused, not half read."""
    paths = make(tmp_path)
    work(paths, Disk())
    paths.state_file.write_bytes(sealed_json({"format": 99, "generation": 1, "progress": {}}))
    with pytest.raises(DamagedResults, match="format 99"):
        ResultsStore(paths, Disk()).recover(lambda path: True)


def test_commit_cost_does_not_grow_with_history(tmp_path: Path) -> None:
    """The hundredth commit does as many operations and writes as many bytes as the tenth."""
    paths, disk = make(tmp_path), CountingDisk()
    store = ResultsStore(paths, disk)
    operations, sizes = [], []
    for number in range(1, 101):
        before = len(disk.operations)
        store.commit(changes(number), Progress(TRAINING, number), {})
        operations.append(len(disk.operations) - before)
        sizes.append((paths.generations / str(number) / "manifest.json").stat().st_size)
    assert operations[99] == operations[9]
    assert sizes[99] - sizes[9] < 100


def test_pools_share_storage(tmp_path: Path) -> None:
    """A pool is another name for the same bytes, in data/ and in generations/."""
    paths = make(tmp_path)
    work(paths, Disk())
    last, pool = paths.data / "pools/last/m.pt", paths.data / f"pools/epoch_{NUM_COMMITS}/m.pt"
    assert last.samefile(pool)
    assert last.stat().st_nlink == 3


def test_file_system_without_hard_links_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where hard links are refused, data/ holds copies with the same content."""

    def refuse(*arguments: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr("os.link", refuse)
    paths = make(tmp_path)
    work(paths, Disk())
    check_view(paths)
    ResultsStore(paths, Disk()).recover(lambda path: True)
    check_view(paths)
