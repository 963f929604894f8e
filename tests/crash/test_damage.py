"""Damaged results: the run goes on from an older commit, loudly, or refuses; nothing is deleted on doubt."""

from __future__ import annotations

import errno
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.errors import DamagedResults, PipelineError
from pipeline.paths import ExperimentPaths
from pipeline.progress import TRAINING, Progress
from pipeline.store.changes import Changes
from pipeline.store.lock import RunLock
from pipeline.store.manifest import read_sealed_json, sealed_json
from pipeline.store.store import ResultsStore
from pipeline.store.verify import inspect
from pipeline.system.disk import Disk, bytes_writer
from tests.crash.life import NUM_COMMITS, Life, changes, is_needed, make, place
from tests.support.experiments import tree
from tests.support.faults import CountingDisk


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder in memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


@pytest.fixture
def paths(tmp_path: Path) -> ExperimentPaths:
    """An experiment with five commits."""
    found = make(tmp_path)
    Life().live(found, Disk())
    return found


def opened(paths: ExperimentPaths, disk: Disk | None = None) -> ResultsStore:
    """Return the store of a run that has just taken the lock."""
    lock = RunLock(paths)
    lock.acquire()
    store = ResultsStore(paths, disk or Disk(), lock.claim)
    store.lock = lock  # type: ignore[attr-defined]
    return store


def check_view(paths: ExperimentPaths) -> None:
    """Whatever happened, data/ shows one commit whole once recovery has run."""
    number = json.loads((paths.data / "component/inner/state.json").read_text())
    assert (paths.data / "pools/last/m.pt").read_bytes() == str(number).encode() * 1000


def damage(stored: Path, shown: Path, how: str) -> None:
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


@pytest.mark.parametrize("content", [b"", b"{", b'{"format": 1}', b"\xff\xfe", b"[]", b"null"])
def test_damaged_state_file_falls_back_to_an_intact_commit(paths: ExperimentPaths, content: bytes) -> None:
    """A torn or foreign state file is survived: the newest commit that is intact goes on."""
    before = tree(paths.data)
    paths.state_file.write_bytes(content)
    store = opened(paths)
    store.recover(is_needed)
    assert store.current.progress == place(NUM_COMMITS)
    assert tree(paths.data) == before


@pytest.mark.parametrize("how", ["flip", "truncate", "remove"])
def test_damaged_newest_commit_falls_back_to_the_one_before(
    paths: ExperimentPaths, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A needed file of the newest commit that is damaged makes the run go on from the commit before, loudly."""
    damage(paths.generations / str(NUM_COMMITS) / "pools/last/m.pt", paths.data / "pools/last/m.pt", how)
    store = opened(paths)
    store.recover(is_needed)
    assert store.current.progress.epoch == NUM_COMMITS - 1
    assert "Damaged: pools/last/m.pt. Continuing from commit 4 (epoch 4, training, step 0)" in caplog.text
    check_view(paths)
    store.commit(changes(NUM_COMMITS), place(NUM_COMMITS), {})
    check_view(paths)


def test_unreadable_file_counts_as_damaged(paths: ExperimentPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """An I/O error while a committed file is read is no crash: the commit before goes on."""
    from pipeline.system import disk as durable

    def failing(path: Path) -> object:
        if f"/generations/{NUM_COMMITS}/pools" in str(path):
            raise OSError(errno.EIO, "Input/output error")
        return original(path)

    original = durable.Digest.of
    monkeypatch.setattr(durable.Digest, "of", failing)
    store = opened(paths)
    store.recover(is_needed)
    assert store.current.progress.epoch == NUM_COMMITS - 1


def test_at_least_two_commits_stay_loadable(tmp_path: Path) -> None:
    """After every single commit, the two latest and two sets of weights are intact."""
    store, paths = None, make(tmp_path)
    for number in range(1, NUM_COMMITS + 1):
        if store is None:
            paths.results.mkdir(parents=True)
            store = opened(paths)
            paths.generations.mkdir()
            paths.data.mkdir()
        store.commit(changes(number), place(number), {})
        intact = [manifest.progress.epoch for manifest in inspect(paths, is_needed).intact]
        assert intact[: min(number, 2)] == list(range(number, 0, -1))[: min(number, 2)]
        assert number != 3 or intact == [3, 2, 1]


def test_partial_commit_keeps_an_older_one_to_fall_back_to(paths: ExperimentPaths) -> None:
    """Weights that two commits share may be damaged: the commit before both is still there."""
    store = opened(paths)
    store.recover(is_needed)
    store.commit(Changes({"w": bytes_writer(b"first")}), Progress(TRAINING, 1), {})
    store.commit(Changes({"w": bytes_writer(b"second")}), Progress(TRAINING, 2), {})
    store.commit(Changes({"v": bytes_writer(b"verdict")}, is_partial=True), Progress(TRAINING, 3), {})
    damage(paths.generations / f"{NUM_COMMITS + 2}/w", paths.data / "w", "flip")
    store.recover(lambda path: path == "w")
    assert store.current.progress.epoch == 1
    assert (paths.data / "w").read_bytes() == b"first"


def test_nothing_intact_is_refused_and_nothing_deleted(paths: ExperimentPaths) -> None:
    """With all commits damaged the store refuses, names the files and leaves all of them."""
    for manifest in paths.generations.glob("*/manifest.json"):
        manifest.write_bytes(b"torn")
    store = opened(paths)
    before = {name: content for name, (content, _) in tree(paths.results).items() if not name.startswith("temp")}
    with pytest.raises(
        DamagedResults, match=r"(?s)generations/5/manifest.json, generations/4/manifest.json\..*Nothing was deleted"
    ):
        store.recover(is_needed)
    assert before == {name: content for name, (content, _) in tree(paths.results).items() if name in before}


def test_deleted_generations_are_taken_back_from_data(paths: ExperimentPaths) -> None:
    """A file that is gone from generations/ but intact in data/ is not lost."""
    (paths.generations / str(NUM_COMMITS) / "pools/last/m.pt").unlink()
    store = opened(paths)
    store.recover(is_needed)
    assert store.current.progress == place(NUM_COMMITS)


def test_deleted_pool_that_nobody_needs_does_not_block(paths: ExperimentPaths) -> None:
    """An older pool deleted everywhere to save space is gone, and the run goes on."""
    (paths.generations / str(NUM_COMMITS - 1) / "pools/last/m.pt").unlink()
    (paths.data / f"pools/epoch_{NUM_COMMITS - 1}/m.pt").unlink()
    store = opened(paths)
    store.recover(is_needed)
    assert store.current.progress == place(NUM_COMMITS)


def forge(paths: ExperimentPaths, name: str, **values: object) -> None:
    """Change a sealed document and seal it again."""
    document = read_sealed_json(paths.generations / str(NUM_COMMITS) / name)
    (paths.generations / str(NUM_COMMITS) / name).write_bytes(sealed_json({**(document or {}), **values}))


@pytest.mark.parametrize("name", ["../../../../canary", "/canary", "a/../../x", "", "."])
@pytest.mark.parametrize("side", ["shown", "stored"])
def test_manifest_that_leads_out_of_the_results_is_not_followed(paths: ExperimentPaths, name: str, side: str) -> None:
    """A forged manifest makes us neither overwrite nor delete anything outside."""
    canary = paths.home / "canary"
    canary.write_text("alive")
    entry = ["5/pools/last/m.pt" if side == "shown" else name, 1000, "0"]
    forge(paths, "manifest.json", files={name if side == "shown" else "pools/x": entry})
    store = opened(paths)
    store.recover(is_needed)
    assert store.current.progress == place(NUM_COMMITS - 1)
    assert canary.read_text() == "alive"


def test_ring_of_sealed_lists_ends(paths: ExperimentPaths) -> None:
    """Lists that name each other as the one before are damage, not an endless loop."""
    forge(paths, "sealed.json", previous=[f"{NUM_COMMITS}/sealed.json", 1, "0"])
    opened(paths).recover(lambda path: False)


def test_newer_format_is_refused(paths: ExperimentPaths) -> None:
    """Results written by a newer version are refused, not half read."""
    paths.state_file.write_bytes(sealed_json({"format": 99, "generation": 1, "progress": {}}))
    with pytest.raises(DamagedResults, match="format 99"):
        opened(paths).recover(is_needed)


def test_older_format_is_migrated(paths: ExperimentPaths) -> None:
    """Results of format 1, which knew one older commit by the name of parent, go on."""
    for file in paths.generations.glob("*/manifest.json"):
        value = json.loads(file.read_text())
        older = value.pop("older")
        for name in ("sha256", "is_partial", "fingerprints"):
            del value[name]
        file.write_bytes(sealed_json({**value, "format": 1, "parent": older[0] if older else None}))
    store = opened(paths)
    store.recover(is_needed)
    assert store.current.progress == place(NUM_COMMITS)
    assert store.current.older == (NUM_COMMITS - 1,)


def test_commit_cost_does_not_grow_with_history(tmp_path: Path) -> None:
    """The hundredth commit does as many operations and writes as many bytes as the tenth."""
    paths, disk = make(tmp_path), CountingDisk()
    for folder in (paths.generations, paths.data):
        folder.mkdir(parents=True)
    store = opened(paths, disk)
    operations, sizes = [], []
    for number in range(1, 101):
        before = len(disk.operations)
        store.commit(changes(number), Progress(TRAINING, number), {})
        operations.append(len(disk.operations) - before)
        sizes.append((paths.generations / str(number) / "manifest.json").stat().st_size)
    assert operations[99] == operations[9]
    assert sizes[99] - sizes[9] < 100


def test_commit_that_cannot_fit_is_refused_before_it_begins(paths: ExperimentPaths) -> None:
    """The space of a commit is checked before the first byte is written, and the sentence names path and sizes."""

    class AlmostFull(Disk):
        def free_bytes(self, path: Path) -> int:
            return 400

    store = opened(paths, AlmostFull())
    store.recover(is_needed)
    before = tree(paths.generations)
    with pytest.raises(PipelineError, match=r"needs 1\.0 kB in .*/store, but 400 B are free"):
        store.commit(changes(7), Progress(TRAINING, 7), {})
    assert tree(paths.generations) == before


def test_results_that_vanish_while_a_commit_is_written_are_told(paths: ExperimentPaths) -> None:
    """Whatever the commit was about to read or write, the sentence says that the folder has gone."""
    store = opened(paths)
    store.recover(is_needed)
    begun = store.begin(changes(7), Progress(TRAINING, 7), {})
    paths.results.rename(paths.home / "gone")
    with pytest.raises(PipelineError, match="has vanished"):
        store.complete(begun)


def test_saved_files_that_cannot_be_read_are_told(paths: ExperimentPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """An I/O error while the files of a component are digested stops the run with the last commit intact."""
    store = opened(paths)
    store.recover(is_needed)
    begun = store.begin(changes(7), Progress(TRAINING, 7), {})

    def failing(path: Path) -> object:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("pipeline.system.disk.Digest.of", failing)
    with pytest.raises(PipelineError, match=r"could not be completed.*The last commit is intact"):
        store.complete(begun)


def test_pools_share_storage(paths: ExperimentPaths) -> None:
    """A pool is another name for the same bytes, in data/ and in generations/."""
    last, pool = paths.data / "pools/last/m.pt", paths.data / f"pools/epoch_{NUM_COMMITS}/m.pt"
    assert last.samefile(pool)
    assert last.stat().st_nlink == 3


def test_file_system_without_hard_links_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where hard links are refused, data/ holds copies with the same content."""

    def refuse(*arguments: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr("os.link", refuse)
    paths = make(tmp_path)
    Life().live(paths, Disk())
    check_view(paths)
    opened(paths).recover(is_needed)
    check_view(paths)
    assert inspect(paths, is_needed).damages == []
