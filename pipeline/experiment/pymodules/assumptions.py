"""What an experiment leaves out, and what is assumed in its place.

The frozen copy holds every assumed file and setting, so results do not depend on what a later version would assume.
What is assumed for a name inside a file of the author's must therefore never change.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_DEFAULTS = Path(__file__).parent / "defaults"
# Families in which a dataset need not have a file, and files that may be missing.
PER_DATASET = ("data_transforms", "dataloaders")
SINGLES = ("checkpoint_saver", "early_stopper", "loss_weighter")
# How long an experiment trains that says nothing about it.
MAX_EPOCHS = 10


@dataclass(frozen=True)
class Assumption:
    """Something that was left out: where it would be, and what stands for it."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def assumed_files(present: Collection[str]) -> dict[str, Path]:
    """Return the file that stands for each one left out, by path below ``pymodules/``, given the paths there are."""
    datasets = sorted(path for path in present if path.startswith("datasets/") and path.endswith(".py"))
    names = [path.removeprefix("datasets/") for path in datasets if path.count("/") == 1]
    wanted = {f"{family}/{name}": _DEFAULTS / f"{family}.py" for family in PER_DATASET for name in names}
    wanted |= {f"{name}.py": _DEFAULTS / f"{name}.py" for name in SINGLES}
    return {path: default for path, default in wanted.items() if path not in present}


def describe_file(path: str, default: Path) -> Assumption:
    """Return the assumption that a file stands for, in the words of its first line."""
    summary = default.read_text().splitlines()[0].strip('"')
    return Assumption(f"pymodules/{path}", summary[0].lower() + summary[1:].rstrip("."))
