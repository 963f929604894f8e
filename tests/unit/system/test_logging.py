"""Where messages go, and that losing them never stops a training."""

from __future__ import annotations

import io
import logging
import re
import sys
from pathlib import Path

import pytest

from pipeline.system.logging import (
    LOGGER,
    log_detail,
    log_file_only,
    log_on_terminal,
    start_console,
    start_file,
)


@pytest.fixture(autouse=True)
def logging_errors() -> object:
    """Put back the switch that a run turns off."""
    raises = logging.raiseExceptions
    yield
    logging.raiseExceptions = raises


def test_line_has_time_experiment_and_message(capsys: pytest.CaptureFixture[str]) -> None:
    """Every line can be found by experiment."""
    start_console("group/run", is_rank_zero=True)
    LOGGER.info("hello")
    time, name, level, message = capsys.readouterr().out.strip().split(" - ")
    assert (name, level, message) == ("group/run", "INFO", "hello")
    assert time.startswith("20")


def test_other_ranks_speak_of_trouble_only(capsys: pytest.CaptureFixture[str]) -> None:
    """What every rank would say is said by rank zero alone."""
    start_console("run", is_rank_zero=False)
    LOGGER.info("progress")
    LOGGER.warning("trouble")
    assert "progress" not in (text := capsys.readouterr().out)
    assert "trouble" in text


def test_output_that_is_no_terminal_gets_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """A redirected log has neither carriage returns nor colours."""
    start_console("run", is_rank_zero=True)
    LOGGER.info("hello")
    assert not {"\r", "\x1b"} & set(capsys.readouterr().out)


def test_closed_terminal_is_survived(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """When the terminal goes away the log file still gets every line."""
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    start_console("run", is_rank_zero=True)
    start_file("run", tmp_path / "logs/train.log")
    terminal.close()
    LOGGER.info("hello")
    assert "hello" in (tmp_path / "logs/train.log").read_text()


def test_log_file_is_appended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A resumed run continues the log of the first."""
    (tmp_path / "train.log").write_text("before\n")
    start_console("run", is_rank_zero=True)
    start_file("run", tmp_path / "train.log")
    LOGGER.info("after")
    before, after = (tmp_path / "train.log").read_text().splitlines()
    assert (before, after.endswith("after")) == ("before", True)


def test_log_file_that_cannot_be_written_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Training continues without a log file."""
    (tmp_path / "file").touch()
    start_console("run", is_rank_zero=True)
    start_file("run", tmp_path / "file/train.log")
    assert "No log file" in capsys.readouterr().out


def test_traceback_goes_to_the_log_file_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The terminal shows the author's own frames, the log file everything."""
    start_console("run", is_rank_zero=True)
    start_file("run", tmp_path / "train.log")
    log_file_only("whole traceback")
    assert "whole traceback" in (tmp_path / "train.log").read_text()
    assert "whole traceback" not in capsys.readouterr().out


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_terminal_gets_short_lines_and_no_details(tmp_path: Path) -> None:
    """It shows what sums up; the log file has date, name and every detail."""
    screen = Terminal()
    start_console("mine", is_rank_zero=True, stream=screen)
    start_file("mine", tmp_path / "train.log")
    log_detail("every step")
    log_on_terminal("every epoch")
    LOGGER.warning("careful")
    first, second = screen.getvalue().splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d every epoch", first)
    assert re.fullmatch(r"WARNING: \d\d:\d\d:\d\d careful", second)
    lines = (tmp_path / "train.log").read_text().splitlines()
    assert [line.split(" - ")[-1] for line in lines] == ["every step", "careful"]
    assert lines[0].split(" - ")[1:3] == ["mine", "INFO"]


def test_output_that_is_no_terminal_gets_every_detail(capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe or a file has what the log file has."""
    start_console("mine", is_rank_zero=True)
    log_detail("every step")
    log_on_terminal("every epoch")
    said = capsys.readouterr().out
    assert "mine - INFO - every step" in said
    assert "every epoch" not in said
