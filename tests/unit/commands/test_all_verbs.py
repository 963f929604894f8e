"""What all helper verbs have in common."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.__main__ import main
from pipeline.verbs import VERBS
from tests.support.verbs import call


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("verb", VERBS)
def test_help_fits_the_terminal_and_ends_with_an_example(
    verb: str, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks for help can read it and has a line to start from."""
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= columns
    assert f"pipeline {verb}" in text.split("example", 1)[1]


def test_all_verbs_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """The help of the program itself names every verb with one sentence."""
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(f"    {verb}" in text for verb in VERBS)


def test_flags_of_a_run_are_for_verbs_that_start_one(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What stands behind -- is refused where it would mean nothing."""
    with pytest.raises(SystemExit) as error:
        call(home, "status", "tiny", "--", "--resume")
    assert error.value.code == 2
    assert "status takes no flags" in capsys.readouterr().err


def test_reader_that_has_seen_enough_is_no_error(home: Path) -> None:
    """`… | head -1` ends a verb without a traceback."""
    line = f"{sys.executable} -m pipeline new --help --data-home {home} | head -1"
    done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, check=False)
    assert done.stderr == ""
