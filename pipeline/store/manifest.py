"""Manifests: what a generation consists of, with the digest of every file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pipeline.errors import DamagedResults
from pipeline.paths import is_inside
from pipeline.progress import Progress
from pipeline.system.disk import Digest
from pipeline.system.files import read_regular

FORMAT = 2
MANIFEST_FILE = "manifest.json"
_NOTHING_DONE = Progress()
Parsed = TypeVar("Parsed")
# A JSON object as it was parsed, or as it will be written.
JsonObject = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """One committed file: where its bytes are, below ``generations/``, and what they must be."""

    object: str
    digest: Digest

    @property
    def generation(self) -> int:
        """The commit that introduced the file."""
        return int(self.object.partition("/")[0])

    def as_json(self) -> list[str | int]:
        return [self.object, self.digest.size, self.digest.sha256]

    @classmethod
    def from_json(cls, value: list[Any]) -> Entry:
        stored, size, sha256 = value
        entry = cls(stored, Digest(size, sha256))
        if not is_inside(stored) or entry.generation < 1 or type(size) is not int or type(sha256) is not str:
            raise ValueError(f"{value} is not a committed file")
        return entry


@dataclass(frozen=True)
class Manifest:
    """One committed generation; ``older`` are those that stay loadable with it, the newest first.

    ``sealed`` points at the newest list of files that never change again; each list names the one before
    it, so a commit writes only what is new however long the history is. A partial commit shares its most
    important files with the one before. ``fingerprints`` describe the datasets.
    """

    generation: int = 0
    older: tuple[int, ...] = ()
    is_partial: bool = False
    progress: Progress = _NOTHING_DONE
    run_state: JsonObject = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    fingerprints: JsonObject = field(default_factory=dict)
    files: dict[str, Entry] = field(default_factory=dict)
    sealed: Entry | None = None

    def objects(self) -> set[str]:
        return {entry.object for entry in self.files.values()}

    def as_json(self) -> JsonObject:
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
    def from_json(cls, value: JsonObject) -> Manifest:
        if value["format"] < FORMAT:
            # Format 1 knew one older commit, whose number was called parent, and no fingerprints.
            older = [value["parent"]] if value["parent"] else []
            value = {**value, "older": older, "is_partial": False, "fingerprints": {}}
        return cls(
            generation=_number(value["generation"]),
            older=tuple(map(_number, value["older"])),
            is_partial=bool(value["is_partial"]),
            progress=Progress.from_json(value["progress"]),
            run_state=dict(value["run_state"]),
            copies=dict(value["copies"]),
            sources=dict(value["sources"]),
            fingerprints=dict(value["fingerprints"]),
            files=_entries(value["files"]),
            sealed=Entry.from_json(value["sealed"]) if value["sealed"] else None,
        )


@dataclass(frozen=True)
class State:
    """Which generation is the current one, and how far it has come."""

    generation: int
    progress: Progress

    def as_json(self) -> JsonObject:
        return {"format": FORMAT, "generation": self.generation, "progress": self.progress.as_json()}

    @classmethod
    def from_json(cls, value: JsonObject) -> State:
        return cls(_number(value["generation"]), Progress.from_json(value["progress"]))


@dataclass(frozen=True)
class SealedList:
    """Files that never change again, and the list before this one."""

    files: dict[str, Entry]
    previous: Entry | None

    def as_json(self) -> JsonObject:
        return {
            "format": FORMAT,
            "previous": self.previous.as_json() if self.previous else None,
            "files": {path: entry.as_json() for path, entry in self.files.items()},
        }

    @classmethod
    def from_json(cls, value: JsonObject) -> SealedList:
        return cls(_entries(value["files"]), Entry.from_json(value["previous"]) if value["previous"] else None)


def _number(value: object) -> int:
    """Return the number of a generation; they are counted from 1."""
    # A bool is an int for isinstance, but not here.
    if type(value) is not int or not 1 <= value < 1 << 53:
        raise ValueError(f"{value!r} is not the number of a commit")
    return value


def _entries(value: JsonObject) -> dict[str, Entry]:
    """Return committed files by path below ``data/``, none of which may lead anywhere else."""
    for path in value:
        if not is_inside(path):
            raise ValueError(f"{path!r} leads out of the results")
    return {path: Entry.from_json(entry) for path, entry in value.items()}


def entries_outside(files: dict[str, Entry], folder: str) -> dict[str, Entry]:
    """Return the files that are not below a folder."""
    return {path: entry for path, entry in files.items() if not path.startswith(folder + "/")}


def rename_entries(files: dict[str, Entry], name: str, other: str) -> dict[str, Entry]:
    """Return a file, or all files of a folder, under another name."""
    return {
        other + path.removeprefix(name): entry
        for path, entry in files.items()
        if path == name or path.startswith(name + "/")
    }


def read_state(path: Path) -> State | None:
    """Return the state, or None if it is missing or damaged."""
    return read_document(path, State.from_json)


def read_document(path: Path, parse: Callable[[JsonObject], Parsed]) -> Parsed | None:
    """Return a state, a manifest or a list of sealed files, or None if it is missing or damaged."""
    value = read_sealed_json(path)
    try:
        return None if value is None else parse(value)
    except (AttributeError, KeyError, TypeError, ValueError):
        # The digest can be right and the content still make no sense, if a file was forged.
        return None


def sealed_json(value: JsonObject) -> bytes:
    """Return a JSON document that carries the digest of its own content."""
    return (json.dumps({"sha256": _digest(value), **value}, indent=1, sort_keys=True) + "\n").encode()


def read_sealed_json(path: Path) -> JsonObject | None:
    """Return the document, or None if it is missing, torn or changed; refuse one of a newer format."""
    try:
        value = json.loads(read_regular(path))
        is_intact = isinstance(value, dict) and value.pop("sha256") == _digest(value)
    except (OSError, ValueError, KeyError, RecursionError):
        return None
    if not is_intact or type(value.get("format")) is not int:
        return None
    if value["format"] > FORMAT:
        raise DamagedResults(
            f"{path} must have format {FORMAT} or older, but has format {value['format']}.\n"
            "  fix: run it with the version of this program that wrote it."
        )
    result: JsonObject = value
    return result


def _digest(value: JsonObject) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
