"""The status file: always whole, and never a reason to stop."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from pipeline.monitoring.status_file import Status, StatusFile, read_status
from pipeline.system.logging import LOGGER


def test_only_the_latest_values_are_told(tmp_path: Path) -> None:
    """A write replaces all that was said before."""
    status = StatusFile(tmp_path / "status.json")
    status.write(state="running", eta=7)
    status.write(state="finished")
    found = read_status(tmp_path / "status.json")
    assert found.content.keys() == {"state", "updated"}


def test_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    """While one process writes, another reads a whole document at any moment."""
    path, status, torn = tmp_path / "status.json", StatusFile(tmp_path / "status.json"), []
    status.write(values=[0] * 5000)
    is_done = threading.Event()

    def watch() -> None:
        while not is_done.is_set():
            try:
                json.loads(path.read_text())
            except ValueError as error:
                torn.append(error)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for number in range(200):
        status.write(values=[number] * (5000 - number))
    is_done.set()
    watcher.join()
    assert torn == []


def test_no_staging_file_is_left(tmp_path: Path) -> None:
    """Only the status file itself remains."""
    StatusFile(tmp_path / "status.json").write(state="running")
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_folder_that_cannot_be_written_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it fails, the training goes on and hears of it once."""
    status, warnings = StatusFile(tmp_path / "gone/status.json"), list[str]()
    monkeypatch.setattr(LOGGER, "warning", lambda text, *values: warnings.append(text % values))
    for epoch in range(3):
        status.write(epoch=epoch)
    assert len(warnings) == 1
    assert "Training continues" in warnings[0]


def test_update_is_due_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fast steps do not write the file each time."""
    status = StatusFile(tmp_path / "status.json")
    assert status.is_due()
    status.write()
    assert not status.is_due()
    monkeypatch.setattr("pipeline.monitoring.status_file.SECONDS_BETWEEN_UPDATES", 0.0)
    assert status.is_due()


@pytest.mark.parametrize("content", [None, "", "{", "[1]"])
def test_status_that_cannot_be_read_is_nothing(tmp_path: Path, content: str | None) -> None:
    """A missing or foreign file reads as no status."""
    if content is not None:
        (tmp_path / "status.json").write_text(content)
    assert read_status(tmp_path / "status.json") == Status()
