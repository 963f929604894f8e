"""Places in an author's code: where a name is defined, and which of the author's lines an exception comes from."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

from pipeline.errors import BrokenContract, Problem
from pipeline.paths import RESULTS_FOLDER, SETTINGS_FOLDER

# A data home has pymodules in two places: as their author wrote them, and the frozen copy.
_AUTHOR_FILE = re.compile(rf"/({SETTINGS_FOLDER}|{RESULTS_FOLDER})/.+/pymodules/")


def place_of(path: Path, name: str) -> str:
    """Return ``file:line`` where a top-level name is set, or the file alone."""
    # A problem may be about an entry, such as settings['frozen']; its line is that of the name.
    word = name.partition("[")[0]
    text = path.read_text(errors="replace") if path.is_file() else ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.split("(")[0].split(":")[0].split("=")[0].split() in ([word], ["def", word], ["class", word]):
            return f"{path}:{number}"
    return str(path)


def author_frames(error: BaseException) -> str:
    """Return the traceback reduced to the author's own files, or an empty string if none of them is involved."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _AUTHOR_FILE.search(frame.filename)]
    if not frames:
        return ""
    return "".join([*traceback.format_list(frames), *traceback.format_exception_only(type(error), error)])


def user_problem(error: BaseException, folder: Path, otherwise: str, must: str) -> Problem:
    """Return what an exception says, placed at the innermost frame inside ``folder``, or of another author's file.

    Code of the frozen copy may go by the name of the file that it is a copy of.
    """
    if isinstance(error, BrokenContract):
        return error.problem
    # The file that cannot be compiled has no frame.
    if isinstance(error, SyntaxError) and error.filename:
        return Problem(f"{error.filename}:{error.lineno}", f"must be valid Python: {error.msg}")
    frames = traceback.extract_tb(error.__traceback__)
    inside = [
        frame for frame in frames if Path(frame.filename).is_relative_to(folder) or _AUTHOR_FILE.search(frame.filename)
    ]
    where = f"{inside[-1].filename}:{inside[-1].lineno}" if inside else otherwise
    if isinstance(error, SystemExit):
        return Problem(where, f"{must}, but calls sys.exit({error.code!r})")
    return Problem(where, f"{must}, but raises {type(error).__name__}: {error}")
