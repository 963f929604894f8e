"""The files an experiment consists of: what is copied, what is ignored, and what cannot be copied safely."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from pipeline.errors import InvalidExperiment, Problem

COPIED = ("pymodules", "settings")
# A file of a family, without its ending: the name of a dataset, a module, an optimizer, ….
COMPONENT_NAME = re.compile(r"[A-Za-z0-9_-]+")
_IGNORED = re.compile(r"__pycache__|\..*|.*~|.*\.(pyc|swp|swo|tmp|bak)|#.*#")


def is_ignored(name: str) -> bool:
    """Return whether a file or folder is an editor's or interpreter's by-product."""
    return _IGNORED.fullmatch(name) is not None


def copied_files(folder: Path) -> list[Path]:
    """Return the files an experiment consists of, or refuse what cannot be copied safely."""
    found = files_with_problems(folder)
    problems = [Problem(str(path), problem) for path, problem in found.items() if problem]
    if problems:
        raise InvalidExperiment(problems)
    return list(found)


def files_with_problems(folder: Path) -> dict[Path, str | None]:
    """Return every file of an experiment with the reason why it cannot be copied, if there is one."""
    paths: list[Path] = []
    for part in COPIED:
        for top, folders, files in os.walk(folder / part):
            # os.walk does not enter links to folders; they are listed like files, so that they are refused.
            links = [name for name in folders if (Path(top) / name).is_symlink()]
            # os.walk enters what is left in this list, in its order.
            folders[:] = sorted(name for name in folders if not is_ignored(name) and name not in links)
            paths += [Path(top) / name for name in sorted([*files, *links]) if not is_ignored(name)]
    return {path: _copy_problem(path, folder) for path in paths}


def _copy_problem(path: Path, folder: Path) -> str | None:
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError):
        return "must be a file, but is a link that leads nowhere"
    # The copy must be complete in itself: what lies elsewhere can change between two starts.
    if not target.is_relative_to(folder.resolve()):
        return f"must not link to a place outside the experiment's folder, but leads to {target}"
    if not stat.S_ISREG(target.stat().st_mode):
        return "must be a regular file or a link to one inside the experiment's folder"
    return None
