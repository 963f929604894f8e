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
        self._generations = Generations(paths)
        self._found = Inspection()
        self._verdicts: dict[str, bool] = {}

    def inspect(self) -> Inspection:
        self._read_commits()
        for manifest in self._found.commits:
            needed = self._generations.needed(manifest, self._is_needed)
            if all(self._holds(entry) for entry in needed.values()):
                self._found.intact.append(manifest)
        self._find_damage()
        if self._found.commits:
            self._compare_with_current(self._found.commits[0])
        leftovers = sorted(self._paths.temp_data.iterdir()) if self._paths.temp_data.is_dir() else []
        self._found.strays += leftovers
        return self._found

    def _read_commits(self) -> None:
        named = self._generations.named()
        if named is None:
            self._found.state_problem = "is missing or damaged"
        for number in self._generations.numbers():
            file = self._generations.manifest_file(number)
            # A folder without a manifest holds files that newer commits still use.
            if number > (number if named is None else named) or not (file.exists() or number == named):
                continue
            manifest = self._generations.manifest(number)
            if manifest is None:
                self._found.unreadable.append(file)
            else:
                self._found.commits.append(manifest)
        if named is not None and not self._generations.manifest_file(named).exists():
            self._found.state_problem = f"names commit {named}, which is not there"

    def _holds(self, entry: Entry) -> bool:
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
            if not self._holds(entry):
                paths, commits = (tuple(dict.fromkeys(column)) for column in zip(*users[name], strict=True))
                file = self._generations.stored(entry)
                source = self._source(paths[0], entry)
                self._found.damages.append(Damage(paths, file, _difference(file, entry), commits, source))

    def _entries(self, manifest: Manifest) -> Iterator[tuple[str, Entry]]:
        yield from manifest.files.items()
        for entry, files in self._generations.sealed_lists(manifest.sealed):
            yield entry.object, entry
            yield from (files or {}).items()

    def _source(self, path: str, entry: Entry) -> Path | None:
        """Return another file with the content that is missing: what data/ shows, or any other committed file."""
        same = (other for manifest in self._found.commits for _, other in self._entries(manifest))
        places = [self._generations.shown(path)]
        places += [self._generations.stored(other) for other in same if other.digest == entry.digest]
        return next((place for place in places if matches(place, entry.digest)), None)

    def _compare_with_current(self, current: Manifest) -> None:
        for path, entry in self._generations.all_files(current).items():
            if not path.startswith(HIDDEN) and self._holds(entry) and not self._shows(path, entry):
                is_pending = not self._generations.shown(path).exists() or self._shows_older(path)
                (self._found.hidden_names if is_pending else self._found.replaced_names).append(path)
        if not self._found.unreadable and self._generations.has_whole_chain(current):
            self._found.strays = self._generations.strays(self._found.commits)

    def _shows(self, path: str, entry: Entry) -> bool:
        return is_same(self._generations.shown(path), self._generations.stored(entry))

    def _shows_older(self, path: str) -> bool:
        """Return whether data/ still has a file of an older commit, as after a kill right behind a commit."""
        older = (manifest.files.get(path) for manifest in self._found.commits[1:])
        return any(entry is not None and self._shows(path, entry) for entry in older)


def _difference(file: Path, entry: Entry) -> str:
    if not file.is_file():
        return "is missing"
    size = file.stat().st_size
    if size != entry.digest.size:
        return f"has {size} bytes instead of {entry.digest.size}"
    return "has another content than was committed"
