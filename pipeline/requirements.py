"""What this Python must have, checked before anything is imported that would fail without it.

Even old versions of Python must be able to read this file.
"""

from __future__ import annotations

import importlib.util
import os
import sys

_OLDEST = (3, 10)
_PACKAGES = ("torch", "numpy", "jsonschema", "filelock", "tqdm")
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH120


def check_requirements() -> None:
    """End with a sentence if Python is too old, or a package that everything needs is not installed."""
    if sys.version_info < _OLDEST:
        version = ".".join(map(str, sys.version_info[:3]))
        needed = ".".join(map(str, _OLDEST))
        _refuse(f"Python {needed} or newer is needed, but {sys.executable} is {version}.")
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        _refuse("{} has no {}.".format(sys.executable, ", ".join(missing)))


def _refuse(problem: str) -> None:
    activate = os.path.join(_ROOT, ".venv", "bin", "activate")  # noqa: PTH118
    if os.path.exists(activate) and sys.prefix != os.path.join(_ROOT, ".venv"):  # noqa: PTH110, PTH118
        fix = f"source {activate}    (the virtual environment of this checkout)"
    else:
        fix = "activate the virtual environment that training-pipeline is installed in, or install it as README.md says"
    # torchrun starts several processes, of which one is enough to say this.
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"training-pipeline cannot run: {problem}\n  fix: {fix}\n")
    raise SystemExit(2)
