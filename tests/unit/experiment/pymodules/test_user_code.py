"""Exceptions of an author's own code are told with the author's own file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.experiment.pymodules.user_code import user_problem


def raised_by(source: str, path: Path) -> BaseException:
    """Return what running a piece of code as if it stood in ``path`` raises."""
    with pytest.raises(BaseException) as raised:  # noqa: PT011
        exec(compile(source, str(path), "exec"), {})
    return raised.value


def test_innermost_own_frame_is_the_place(tmp_path: Path) -> None:
    """The deepest line that the author wrote comes first."""
    error = raised_by("import json\n\ndef f():\n    json.loads('')\n\nf()\n", tmp_path / "a.py")
    problem = user_problem(error, tmp_path, "elsewhere", "must work")
    assert problem.where == f"{tmp_path / 'a.py'}:4"
    assert problem.what.startswith("must work, but raises JSONDecodeError: ")


def test_error_from_elsewhere_is_told_at_the_named_place(tmp_path: Path) -> None:
    """Without a frame of the author's own the file that was being used is named."""
    error = raised_by("1 / 0\n", Path("/usr/lib/other.py"))
    assert user_problem(error, tmp_path, "elsewhere", "must work").where == "elsewhere"


def test_exit_is_told_as_what_it_is(tmp_path: Path) -> None:
    """Code that ends the process is no success."""
    error = raised_by("raise SystemExit(0)\n", tmp_path / "a.py")
    assert "calls sys.exit(0)" in user_problem(error, tmp_path, "", "must work").what
