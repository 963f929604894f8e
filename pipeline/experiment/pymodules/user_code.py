"""Exceptions of an author's code, reported with the author's own file and line."""

from __future__ import annotations

import traceback
from pathlib import Path

from pipeline.errors import Problem


def author_frames(error: BaseException) -> str:
    """Return the traceback reduced to the author's own files, or nothing if none of them is involved."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/pymodules/" in frame.filename]
    if not frames:
        return ""
    return "".join([*traceback.format_list(frames), *traceback.format_exception_only(type(error), error)])


def user_problem(error: BaseException, folder: Path, otherwise: str, must: str) -> Problem:
    """Return what an exception says, placed at the innermost frame inside ``folder``."""
    if isinstance(error, SyntaxError) and error.filename:
        return Problem(f"{error.filename}:{error.lineno}", f"must be valid Python: {error.msg}")
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(folder)]
    where = f"{own[-1].filename}:{own[-1].lineno}" if own else otherwise
    if isinstance(error, SystemExit):
        return Problem(where, f"{must}, but calls sys.exit({error.code!r})")
    return Problem(where, f"{must}, but raises {type(error).__name__}: {error}")
