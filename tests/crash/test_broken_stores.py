"""Tests of the tests: stores with a deliberate flaw must not get through."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from pipeline.errors import PipelineError
from pipeline.store.manifest import MANIFEST_FILE, Manifest, State, sealed_json
from pipeline.store.store import BegunCommit, ResultsStore
from pipeline.system.disk import bytes_writer
from tests.crash.test_store import POWER_CUTS, cut_everywhere, kill_everywhere
from tests.support.faults import PowerCutDisk

Result = TypeVar("Result")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder in memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


class CommitsBeforeWriting(ResultsStore):
    """Names the new generation before its files are in place."""

    def complete(self, begun: BegunCommit) -> None:
        self._replace_state(begun.manifest)
        super().complete(begun)


class DeletesBeforeWriting(ResultsStore):
    """Makes room by removing what the last commit still needs."""

    def complete(self, begun: BegunCommit) -> None:
        for entry in self.current.files.values():
            self._disk.remove(self._generations.stored(entry))
        super().complete(begun)


class WritesInPlace(ResultsStore):
    """Overwrites the weights of the last commit instead of writing new files."""

    def complete(self, begun: BegunCommit) -> None:
        for entry in self.current.files.values():
            path = self._generations.stored(entry)
            self._disk.perform("write", path, lambda path=path: path.write_bytes(b"half of it"))
        super().complete(begun)


class ForgetsToTidy(ResultsStore):
    """Leaves behind what older generations alone needed."""

    def _drop(self, dropped: list[Manifest]) -> None:
        return

    def _sweep(self) -> None:
        return


class SealsWrongly(ResultsStore):
    """Writes digests down that do not belong to the files."""

    def _stage(self, begun: BegunCommit) -> Manifest:
        staged = super()._stage(begun)
        (begun.staging / "pools/last/m.pt").write_bytes(b"something else")
        return staged


class SyncsNoContent(PowerCutDisk):
    """Says that a file is safe without having synced it."""

    def _sync_content(self, path: Path) -> None:
        return


class SyncsNoNames(PowerCutDisk):
    """Says that a folder is safe without having synced it."""

    def perform(self, operation: str, path: Path, action: Callable[[], Result]) -> Result:
        return super().perform("skip" if operation == "sync folder" else operation, path, action)


@pytest.mark.parametrize(
    "flaw", [CommitsBeforeWriting, DeletesBeforeWriting, WritesInPlace, ForgetsToTidy, SealsWrongly]
)
def test_flawed_store_is_caught_by_kills(tmp_path: Path, flaw: type[ResultsStore]) -> None:
    """A store that commits too early, deletes too early, overwrites, leaves waste or lies is found out."""
    with pytest.raises((AssertionError, PipelineError)):
        kill_everywhere(tmp_path, "torn", flaw)


@pytest.mark.parametrize("flaw", [SyncsNoContent, pytest.param(SyncsNoNames, marks=pytest.mark.slow)])
def test_missing_sync_is_caught_by_power_cuts(tmp_path: Path, flaw: type[PowerCutDisk]) -> None:
    """A disk that does not sync content, or does not sync names, is found out."""
    with pytest.raises((AssertionError, PipelineError)):
        cut_everywhere(tmp_path, POWER_CUTS, disk_class=flaw)


def test_store_that_does_not_sync_its_folders_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving out any single kind of folder sync of a commit loses a promised commit in some power cut."""

    def renamed_without_sync(self: ResultsStore, begun: BegunCommit) -> None:
        manifest = self._stage(begun)
        self._disk.write(begun.staging / MANIFEST_FILE, bytes_writer(sealed_json(manifest.as_json())))
        self._disk.rename(begun.staging, self._paths.generations / str(manifest.generation))
        self._replace_state(manifest)
        self._next, self.current, self._older = self._next + 1, manifest, begun.kept

    class Careless(ResultsStore):
        complete = renamed_without_sync

    with pytest.raises((AssertionError, PipelineError)):
        cut_everywhere(tmp_path, POWER_CUTS, Careless)


class StatesWithoutSync(ResultsStore):
    """Replaces state.json and goes on before its folder is synced."""

    def _replace_state(self, manifest: Manifest) -> None:
        state, staging = State(manifest.generation, manifest.progress), self.claim.folder / "state.json"
        self._disk.write(staging, bytes_writer(sealed_json(state.as_json())))
        self._disk.rename(staging, self._paths.state_file)


@pytest.mark.slow
def test_state_that_is_not_synced_is_caught(tmp_path: Path) -> None:
    """A power cut brings the old state.json back, and with it a commit that is older than was promised."""
    with pytest.raises((AssertionError, PipelineError)):
        cut_everywhere(tmp_path, POWER_CUTS, StatesWithoutSync)
