"""Manifests: what a generation consists of, with the digest of every file."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import DamagedResults
from pipeline.progress import Progress
from pipeline.runtime.durable import Digest

FORMAT = 2
MANIFEST_FILE = "manifest.json"
_NOTHING_DONE = Progress()


@dataclass(frozen=True)
class Entry:
    """One committed file: where its bytes are, below ``generations/``, and what they must be."""

    object: str
    digest: Digest

    def as_json(self) -> list[Any]:
        return [self.object, self.digest.size, self.digest.sha256]

    @classmethod
    def from_json(cls, value: list[Any]) -> Entry:
        return cls(str(value[0]), Digest(int(value[1]), str(value[2])))


@dataclass(frozen=True)
class Manifest:
    """One committed generation; ``older`` are those that stay loadable beside it, the newest first.

    ``sealed`` points at the newest list of files that never change again; each list names the one before
    it, so a commit writes only what is new however long the history is. A partial commit shares its most
    important files with the one before. ``fingerprints`` tell what the datasets looked like.
    """

    generation: int = 0
    older: tuple[int, ...] = ()
    is_partial: bool = False
    progress: Progress = _NOTHING_DONE
    run_state: dict[str, Any] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    fingerprints: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Entry] = field(default_factory=dict)
    sealed: Entry | None = None

    def objects(self) -> set[str]:
        return {entry.object for entry in self.files.values()}

    def as_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "generation": self.generation,
            "older": list(self.older),
            "is_partial": self.is_partial,
            "progress": self.progress.as_json(),
            "run_state": self.run_state,
            "copies": self.copies,
            "sources": self.sources,
            "fingerprints": self.fingerprints,
            "files": {path: entry.as_json() for path, entry in sorted(self.files.items())},
            "sealed": self.sealed.as_json() if self.sealed else None,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Manifest:
        value = value if value["format"] == FORMAT else _migrated(value)
        return cls(
            generation=int(value["generation"]),
            older=tuple(value["older"]),
            is_partial=value["is_partial"],
            progress=Progress.from_json(value["progress"]),
            run_state=value["run_state"],
            copies=value["copies"],
            sources=value["sources"],
            fingerprints=value["fingerprints"],
            files={path: Entry.from_json(entry) for path, entry in value["files"].items()},
            sealed=Entry.from_json(value["sealed"]) if value["sealed"] else None,
        )


def _migrated(value: dict[str, Any]) -> dict[str, Any]:
    """Return what format 1 said in the words of format 2: it knew one older commit and no fingerprints."""
    older = [value["parent"]] if value["parent"] else []
    return {**value, "older": older, "is_partial": False, "fingerprints": {}}


def sealed_json(value: dict[str, Any]) -> bytes:
    """Return a JSON document that carries the digest of its own content."""
    return (json.dumps({"sha256": _digest(value), **value}, indent=1, sort_keys=True) + "\n").encode()


def read_sealed_json(path: Path) -> dict[str, Any] | None:
    """Return the document, or None if it is missing, torn or changed; refuse one of a newer format."""
    try:
        value = json.loads(path.read_bytes())
        intact = isinstance(value, dict) and value.pop("sha256") == _digest(value)
    except (OSError, ValueError, KeyError):
        return None
    if not intact:
        return None
    if value["format"] > FORMAT:
        raise DamagedResults(
            f"{path} must have format {FORMAT} or older, but has format {value['format']}.\n"
            "  fix: run it with the version of this program that wrote it."
        )
    result: dict[str, Any] = value
    return result


def _digest(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
