"""Commands of messages are built whatever has become of the folders around a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.command_lines import run_line, show_program, verb_line


def test_deleted_folder_does_not_hide_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose current folder was deleted still says how to continue."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert run_line("tiny", tmp_path, "--resume").endswith(f"tiny --data-home {tmp_path} --resume")
    assert verb_line("status", "tiny", tmp_path).endswith(f"status tiny --data-home {tmp_path}")


def test_program_of_the_current_folder_is_named_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bare name would be looked for in PATH."""
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir(tmp_path)
    assert show_program("torchrun") == str(tmp_path / "torchrun")
    monkeypatch.chdir(tmp_path.parent)
    assert show_program("torchrun") == f"{tmp_path.name}/torchrun"


def test_names_that_a_shell_would_read_are_quoted(tmp_path: Path) -> None:
    """A data home with blanks is one word."""
    assert "--data-home '/a b'" in verb_line("status", "tiny", Path("/a b"))
