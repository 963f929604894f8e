"""The progress bar: on a terminal only, and never a reason to stop."""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from unittest.mock import patch

import pytest
from tqdm import tqdm

from pipeline.system.logging import LOGGER
from pipeline.tracking.progress_bar import ProgressBar


class Terminal(io.StringIO):
    """A terminal that can go away."""

    error: OSError | None = None

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.error is not None:
            raise self.error
        return super().write(text)


@contextmanager
def bar_on(
    stream: io.StringIO, total: int, *, done: int = 0, updates: int = 10, enabled: bool = True
) -> Iterator[ProgressBar]:
    """Show a bar on a stream and draw it whenever it asks to be drawn."""
    with (
        patch.object(sys, "stderr", stream),
        ProgressBar("train 1", total, done, updates, enabled=enabled) as bar,
    ):
        if bar._bar is not None:
            bar._bar.mininterval = 0
        yield bar


def walk(stream: io.StringIO, rounds: int, *, done: int = 0, updates: int = 10, enabled: bool = True) -> str:
    """Drive a bar through the rest of a loop and return what the stream shows."""
    with bar_on(stream, done + rounds, done=done, updates=updates, enabled=enabled) as bar:
        for _ in range(rounds):
            bar.advance()
    return stream.getvalue()


def test_bar_shows_title_and_total() -> None:
    """A person sees which loop runs and how far it has come."""
    text = walk(Terminal(), 20)
    assert "train 1" in text
    assert "10/20" in text
    assert "20/20" in text


def test_resumed_bar_begins_where_the_loop_does() -> None:
    """Steps of before the resume are already done."""
    text = walk(Terminal(), 5, done=15)
    assert "15/20" in text
    assert "20/20" in text
    assert " 0/20" not in text


@pytest.mark.parametrize("updates", [5, 20])
def test_bar_is_drawn_as_often_as_the_settings_say(updates: int) -> None:
    """A loop of a thousand rounds draws the given number of times, and at its begin and end."""
    assert updates <= walk(Terminal(), 1000, updates=updates).count("train 1") <= updates + 2


def test_output_that_is_no_terminal_shows_no_bar() -> None:
    """A redirected log has no carriage returns."""
    assert walk(io.StringIO(), 20) == ""


def test_bar_can_be_turned_off() -> None:
    """The settings decide whether there is a bar."""
    assert walk(Terminal(), 20, enabled=False) == ""


def test_loop_without_rounds_has_a_bar_too() -> None:
    """An empty loop divides by nothing."""
    assert "0/0" not in walk(Terminal(), 0)


def test_terminal_that_breaks_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop goes on to its end when the terminal goes away, and one line tells it."""
    terminal, warnings = Terminal(), list[str]()
    monkeypatch.setattr(LOGGER, "warning", lambda text, *values: warnings.append(text % values))
    with bar_on(terminal, 100, updates=100) as bar:
        for number in range(100):
            terminal.error = BrokenPipeError(errno.EPIPE, "Broken pipe") if number > 10 else None
            bar.advance()
    terminal.error = None
    assert bar._done == 100
    assert warnings == ["The progress bar is gone: [Errno 32] Broken pipe. Training continues."]


@pytest.mark.parametrize("ending", ["closed", "hung up"])
def test_terminal_that_goes_away_never_raises(ending: str) -> None:
    """A closed stream and a lost connection are survived from the first round to the last."""
    terminal = Terminal()
    with bar_on(terminal, 10) as bar:
        terminal.error = OSError(errno.EIO, "Input/output error")
        if ending == "closed":
            terminal.close()
        for _ in range(10):
            bar.advance()
    assert bar._done == 10


def test_lines_of_other_threads_come_through_after_the_terminal_broke(capsys: pytest.CaptureFixture[str]) -> None:
    """tqdm keeps its lock when it cannot draw; a thread that has something to say must not wait for it for ever."""
    terminal = Terminal()
    with bar_on(terminal, 10) as bar:
        terminal.error = OSError(errno.EIO, "Input/output error")
        bar.advance()
    speaking = Thread(target=tqdm.write, args=("hello",), daemon=True)
    speaking.start()
    speaking.join(5)
    assert "hello" in capsys.readouterr().out


def test_debugger_stops_in_the_authors_frame_behind_a_cleared_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """breakpoint() while a bar is shown is that of the line it stands in; afterwards Python's own hook is back."""
    frames = []
    monkeypatch.setattr("pdb.Pdb.set_trace", lambda debugger, frame: frames.append(frame))
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    monkeypatch.setattr(sys, "breakpointhook", sys.__breakpointhook__)
    stream = Terminal()
    with bar_on(stream, 20) as bar:
        for _ in range(10):
            bar.advance()
        breakpoint()
    assert [frame.f_code.co_name for frame in frames] == [
        "test_debugger_stops_in_the_authors_frame_behind_a_cleared_bar"
    ]
    assert sys.breakpointhook is sys.__breakpointhook__


def test_other_debugger_is_used_where_one_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook of the user's own, as an IDE sets it, is called as ever."""
    called = []
    monkeypatch.setattr(sys, "breakpointhook", lambda *arguments: called.append(arguments))
    with bar_on(Terminal(), 20):
        breakpoint()
    assert called == [()]
