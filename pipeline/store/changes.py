"""What one commit changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.system.disk import Writer


@dataclass
class Changes:
    """What a commit changes, by path below ``data/``; the store knows nothing else of training.

    ``files`` and ``folders`` say how each is written. ``same_as`` maps a new name to the committed file or folder that
    it also names. ``sealed`` files never change again: the store lists them once and never looks at them in later
    commits. A partial commit shares its most important files with the one before. ``shards`` are folders that all
    processes fill together once the commit has begun. Paths below ``running/`` belong to the running epoch and are not
    shown in ``data/``.
    """

    files: dict[str, Writer] = field(default_factory=dict)
    folders: dict[str, Callable[[Path], None]] = field(default_factory=dict)
    same_as: dict[str, str] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    sealed: dict[str, Writer] = field(default_factory=dict)
    is_partial: bool = False
    num_bytes: int = 0
    shards: tuple[str, ...] = ()

    def __or__(self, other: Changes) -> Changes:
        return Changes(
            self.files | other.files,
            self.folders | other.folders,
            self.same_as | other.same_as,
            self.removed | other.removed,
            self.sealed | other.sealed,
            self.is_partial and other.is_partial,
            self.num_bytes + other.num_bytes,
            self.shards + other.shards,
        )
