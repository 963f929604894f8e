"""The committed generations as they are on disk; looking at them changes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from pipeline.paths import RUNNING_STEPS, ExperimentPaths
from pipeline.store.manifest import (
    MANIFEST_FILE,
    Entry,
    Manifest,
    SealedList,
    read_document,
    read_state,
)
from pipeline.system.disk import Digest
from pipeline.system.files import regular_size

HIDDEN = f"{RUNNING_STEPS}/"
Document = TypeVar("Document", Manifest, SealedList)


class Generations:
    """Reads manifests and lists of sealed files, and compares files with their digests.

    Committed documents never change. With ``remembers``, each is read once: for one look at everything, because the
    documents of a long history take memory.
    """

    def __init__(self, paths: ExperimentPaths, *, remembers: bool = False) -> None:
        self._paths = paths
        self._remembers = remembers
        self._documents: dict[Path, Manifest | SealedList] = {}

    def read_current_number(self) -> int | None:
        """Return the generation that the state file names, or None if the state file cannot be read."""
        state = read_state(self._paths.state_file)
        return state.generation if state else None

    def numbers(self) -> list[int]:
        """Return the generations that have a folder, the newest first."""
        names = os.listdir(self._paths.generations) if self._paths.generations.is_dir() else []
        return sorted((int(name) for name in names if name.isascii() and name.isdigit()), reverse=True)

    def manifest_file(self, generation: int) -> Path:
        return self._paths.generations / str(generation) / MANIFEST_FILE

    def manifest(self, generation: int) -> Manifest | None:
        return self._read(self.manifest_file(generation), Manifest)

    def _read(self, path: Path, kind: type[Document]) -> Document | None:
        """Return a committed document, or None if it cannot be read."""
        known = self._documents.get(path)
        if isinstance(known, kind):
            return known
        document = read_document(path, kind.from_json)
        if document is not None and self._remembers:
            self._documents[path] = document
        return document

    def older(self, manifest: Manifest) -> list[Manifest]:
        """Return those of the other manifests that can be read, the newest first."""
        manifests = (self.manifest(generation) for generation in manifest.older)
        return [older for older in manifests if older is not None]

    def stored(self, entry: Entry) -> Path:
        return self._paths.generations / entry.object

    def public_file(self, path: str) -> Path:
        return self._paths.data / path

    def sealed_list(self, entry: Entry) -> SealedList | None:
        """Return one list of sealed files, or None if it cannot be read."""
        sealed_list = self._read(self.stored(entry), SealedList)
        previous = sealed_list.previous if sealed_list else None
        # Each list is older than the one that names it: a ring of them would never end.
        return None if previous is not None and previous.generation >= entry.generation else sealed_list

    def sealed_lists(self, entry: Entry | None) -> Iterator[tuple[Entry, dict[str, Entry] | None]]:
        """Yield each list with its files, the newest first; one that cannot be read is the last, with None."""
        while entry is not None:
            sealed_list = self.sealed_list(entry)
            yield entry, sealed_list.files if sealed_list else None
            entry = sealed_list.previous if sealed_list else None

    def all_files(self, manifest: Manifest) -> dict[str, Entry]:
        """Return every file a generation consists of, sealed ones included, by its path below data/."""
        sealed = (files or {} for _, files in self.sealed_lists(manifest.sealed))
        return {**manifest.files, **{path: entry for files in sealed for path, entry in files.items()}}

    def objects(self, manifest: Manifest) -> set[str]:
        """Return all that a generation needs below generations/: its manifest, files, lists and sealed files."""
        lists = list(self.sealed_lists(manifest.sealed))
        sealed = {entry.object for _, files in lists for entry in (files or {}).values()}
        # A store that has not committed yet has a manifest in memory only.
        stored = {f"{manifest.generation}/{MANIFEST_FILE}"} if manifest.generation else set()
        return stored | manifest.objects() | sealed | {entry.object for entry, _ in lists}

    def has_whole_chain(self, manifest: Manifest) -> bool:
        """Return whether every list of sealed files can be read."""
        return all(files is not None for _, files in self.sealed_lists(manifest.sealed))

    def needed_files(self, manifest: Manifest, is_needed: Callable[[str], bool]) -> dict[str, Entry]:
        """Return what a resume reads: its files, and the records sealed by the latest training and evaluation."""
        needed = {path: entry for path, entry in manifest.files.items() if is_needed(path)}
        for position, (entry, files) in enumerate(self.sealed_lists(manifest.sealed)):
            # Each of the two stages of an epoch seals one list. Older ones are history, which no resume reads.
            if position == 2:
                break
            needed |= {entry.object: entry, **(files or {})}
        return needed

    def strays(self, manifests: list[Manifest]) -> list[Path]:
        """Return what none of these generations needs: left by an interrupted commit or clean-up."""
        kept = {name for manifest in manifests for name in self.objects(manifest)}
        files = sorted(path for path in self._paths.generations.rglob("*") if not path.is_dir())
        return [path for path in files if path.relative_to(self._paths.generations).as_posix() not in kept]


def is_same(target: Path, source: Path) -> bool:
    """Return whether a name in data/ stands for a stored file: a hard link, or a copy where there are none."""
    if not target.is_file() or not source.is_file():
        return False
    # A file with a second name that is not this one is a link to something else, whatever its content.
    return target.samefile(source) or (target.stat().st_nlink == 1 and Digest.of(target) == Digest.of(source))


def matches(path: Path, digest: Digest) -> bool:
    """Return whether a file is what its digest says; one that cannot be read is not."""
    try:
        return regular_size(path) == digest.size and Digest.of(path) == digest
    except OSError:
        return False
