"""Inspection: every digest and cross-reference of a results folder verified, and nothing changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.paths import ExperimentPaths
from pipeline.store.generations import HIDDEN, Generations, is_same, matches
from pipeline.store.manifest import Entry, Manifest


@dataclass(frozen=True)
class Damage:
    """A committed file that is not what its digest says; ``source`` has the same content, if anything has."""

    paths: tuple[str, ...]
    file: Path
    what: str
    commits: tuple[int, ...]
    source: Path | None = None


@dataclass
class Inspection:
    """What was found: commits, the newest first, and all that is wrong."""

    commits: list[Manifest] = field(default_factory=list)
    intact: list[Manifest] = field(default_factory=list)
    num_files: int = 0
    num_bytes: int = 0
    state_problem: str = ""
    damages: list[Damage] = field(default_factory=list)
    unreadable: list[Path] = field(default_factory=list)
    hidden_names: list[str] = field(default_factory=list)
    replaced_names: list[str] = field(default_factory=list)
    strays: list[Path] = field(default_factory=list)
    edited_copies: list[str] = field(default_factory=list)

    @property
    def is_damaged(self) -> bool:
        return bool(self.state_problem or self.damages or self.unreadable or self.replaced_names or self.edited_copies)

    @property
    def is_incomplete(self) -> bool:
        """Return whether something is left to do that the next start does by itself, as after a kill."""
        return bool(self.hidden_names or self.strays)

    @property
    def is_clean(self) -> bool:
        return not (self.is_damaged or self.is_incomplete)


def inspect(paths: ExperimentPaths, is_needed: Callable[[str], bool]) -> Inspection:
    """Verify everything; ``is_needed`` selects what a resume reads, and so which commits it could continue from."""
    return _Inspector(paths, is_needed).inspect()


class _Inspector:
    def __init__(self, paths: ExperimentPaths, is_needed: Callable[[str], bool]) -> None:
        self._paths = paths
        self._is_needed = is_needed
        self._generations = Generations(paths, remembers=True)
        self._found = Inspection()
        # A file is digested once, however many commits and names refer to it.
        self._verdicts: dict[str, bool] = {}

    def inspect(self) -> Inspection:
        named = self._generations.read_current_number()
        if named is None:
            self._found.state_problem = "is missing or damaged"
        elif not self._generations.manifest_file(named).exists():
            self._found.state_problem = f"names commit {named}, which is not there"
        for number in self._generations.numbers():
            file = self._generations.manifest_file(number)
            # A folder without a manifest holds files that newer commits still use. A newer generation than the state
            # names was left by a kill before the commit was complete.
            is_newer = named is not None and number > named
            if is_newer or not (file.exists() or number == named):
                continue
            manifest = self._generations.manifest(number)
            if manifest is None:
                self._found.unreadable.append(file)
                continue
            self._found.commits.append(manifest)
            needed = self._generations.needed_files(manifest, self._is_needed)
            if all(self._holds(entry) for entry in needed.values()):
                self._found.intact.append(manifest)
        self._find_damage()
        if self._found.commits:
            self._compare_with_current(self._found.commits[0])
        self._found.strays += sorted(self._paths.temp_data.iterdir()) if self._paths.temp_data.is_dir() else []
        return self._found

    def _holds(self, entry: Entry) -> bool:
        """Return whether a committed file is what its digest says."""
        if entry.object not in self._verdicts:
            self._verdicts[entry.object] = matches(self._generations.stored(entry), entry.digest)
            self._found.num_files += 1
            self._found.num_bytes += entry.digest.size
        return self._verdicts[entry.object]

    def _find_damage(self) -> None:
        users: dict[str, list[tuple[str, int]]] = {}
        entries: dict[str, Entry] = {}
        for manifest in self._found.commits:
            for path, entry in self._entries(manifest):
                users.setdefault(entry.object, []).append((path, manifest.generation))
                entries[entry.object] = entry
        for name, entry in entries.items():
            if self._holds(entry):
                continue
            paths, commits = (tuple(dict.fromkeys(column)) for column in zip(*users[name], strict=True))
            file = self._generations.stored(entry)
            if not file.is_file():
                problem = "is missing"
            elif file.stat().st_size != entry.digest.size:
                problem = f"has {file.stat().st_size} bytes instead of {entry.digest.size}"
            else:
                problem = "has another content than was committed"
            # The same content may be what data/ shows, or another committed file.
            sources = [self._generations.public_file(paths[0])]
            sources += [self._generations.stored(other) for other in entries.values() if other.digest == entry.digest]
            source = next((file for file in sources if matches(file, entry.digest)), None)
            self._found.damages.append(Damage(paths, file, problem, commits, source))

    def _entries(self, manifest: Manifest) -> Iterator[tuple[str, Entry]]:
        yield from manifest.files.items()
        for entry, files in self._generations.sealed_lists(manifest.sealed):
            yield entry.object, entry
            yield from (files or {}).items()

    def _compare_with_current(self, current: Manifest) -> None:
        """Compare data/ and all stored files with the newest commit that can be read."""
        for path, entry in self._generations.all_files(current).items():
            public = self._generations.public_file(path)
            if path.startswith(HIDDEN) or not self._holds(entry) or is_same(public, self._generations.stored(entry)):
                continue
            # After a kill right behind a commit, data/ still has the file of an older one, or none.
            older = [manifest.files[path] for manifest in self._found.commits[1:] if path in manifest.files]
            is_older = any(is_same(public, self._generations.stored(other)) for other in older)
            names = self._found.hidden_names if is_older or not public.exists() else self._found.replaced_names
            names.append(path)
        if not self._found.unreadable and self._generations.has_whole_chain(current):
            self._found.strays = self._generations.strays(self._found.commits)
