"""The results directory as a small transactional store.

    temp_data/generation_<k>/   the commit being written
    generations/<k>/            immutable files that commit k introduced, with its manifest
    state.json                  names the current generation; replacing it is the commit
    data/                       the current generation under its public names, by hard links

A commit writes new files, makes them durable, moves them in one rename beside the older generations and
then replaces state.json. All that comes after, showing the files in data/ and dropping generations that
nobody needs, can be repeated at any time. The previous generation stays loadable.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.errors import DamagedResults
from pipeline.paths import ExperimentPaths
from pipeline.progress import Progress
from pipeline.results.manifest import (
    MANIFEST_FILE,
    Entry,
    Manifest,
    SealedList,
    State,
    read_manifest,
    read_sealed_list,
    read_state,
    sealed_json,
)
from pipeline.runtime.durable import Changes, Digest, Disk, bytes_writer
from pipeline.runtime.logs import LOGGER
from pipeline.runtime.regular_files import regular_size

SEALED_FILE = "sealed.json"
HIDDEN = "running/"


class ResultsStore:
    """Commits and recovers the state of one experiment; only the holder of the run lock may use it."""

    def __init__(self, paths: ExperimentPaths, disk: Disk) -> None:
        self._paths, self._disk = paths, disk
        self.current = Manifest()
        self._parent = Manifest()
        self._next = 1
        self._has_broken_chain = False

    def initialise(self, copies: dict[str, str], sources: dict[str, str]) -> None:
        """Take note of the digests of the frozen copy and of what it was copied from; every commit carries them."""
        self.current = replace(self.current, copies=copies, sources=sources)

    def commit(self, changes: Changes, progress: Progress, run_state: dict[str, Any]) -> None:
        """Make ``changes`` the current state, whole or not at all."""
        generation, staging = self._next, self._paths.temp_data / f"generation_{self._next}"
        previous = self.current
        # A commit that shares its weights with the one before is no safer than that: the older one stays as well.
        keeps_older = changes.is_partial and self._parent.generation > 0
        fallback, dropped = (self._parent, previous) if keeps_older else (previous, self._parent)
        self._disk.make_scratch_folder(staging)
        manifest = previous.successor(generation, fallback.generation, progress, run_state)
        manifest = self._stage(changes, manifest, staging)
        self._disk.write(staging / MANIFEST_FILE, bytes_writer(sealed_json(manifest.as_json())))
        self._disk.sync_folders(staging)
        self._disk.rename(staging, self._paths.generations / str(generation))
        self._disk.sync_folder(self._paths.generations)
        self._replace_state(manifest)
        self._next += 1
        self._parent, self.current = fallback, manifest
        self._show(dict(self._changed(previous, manifest)))
        self._hide(set(previous.files) - set(manifest.files))
        self._drop(dropped)
        if progress.is_finished:
            self._disk.sync_folders(self._paths.data)

    def _stage(self, changes: Changes, manifest: Manifest, staging: Path) -> Manifest:
        files = {path: entry for path, entry in manifest.files.items() if path not in changes.removed}
        for path, writer in changes.files.items():
            files[path] = self._write(staging, path, writer)
        for folder, save in changes.folders.items():
            files = {path: entry for path, entry in files.items() if not path.startswith(folder + "/")}
            files.update(self._save_folder(staging, folder, save))
        for path, other in changes.same_as.items():
            files[path] = files[other]
        return replace(manifest, files=files, sealed=self._stage_sealed(changes, manifest, staging))

    def _stage_sealed(self, changes: Changes, manifest: Manifest, staging: Path) -> Entry | None:
        if not changes.sealed:
            return manifest.sealed
        entries = {path: self._write(staging, path, writer) for path, writer in changes.sealed.items()}
        listed = SealedList(entries, manifest.sealed)
        return self._write(staging, SEALED_FILE, bytes_writer(sealed_json(listed.as_json())))

    def _write(self, staging: Path, path: str, writer: Callable[[Any], None]) -> Entry:
        self._disk.make_scratch_folder((staging / path).parent)
        return Entry(f"{self._next}/{path}", self._disk.write(staging / path, writer))

    def _save_folder(self, staging: Path, folder: str, save: Callable[[Path], None]) -> Iterator[tuple[str, Entry]]:
        """Let a component write its folder, then make durable whatever it wrote."""
        self._disk.make_scratch_folder(staging / folder)
        self._disk.perform("save", staging / folder, lambda: save(staging / folder))
        for path in sorted((staging / folder).rglob("*"), reverse=True):
            if path.is_dir():
                self._remove_empty_folders(path, staging)
        self._remove_empty_folders(staging / folder, staging)
        for path in sorted((staging / folder).rglob("*")):
            if path.is_file():
                self._disk.sync_file(path)
                name = path.relative_to(staging).as_posix()
                yield name, Entry(f"{self._next}/{name}", Digest.of(path))

    def _replace_state(self, manifest: Manifest) -> None:
        state = State(manifest.generation, manifest.progress)
        staging = self._paths.temp_data / "state.json"
        self._disk.replace_file(self._paths.state_file, bytes_writer(sealed_json(state.as_json())), staging)

    def _changed(self, previous: Manifest, manifest: Manifest) -> Iterator[tuple[str, Entry]]:
        """Yield what differs from the commit before: new files, and new names for older ones."""
        yield from ((path, entry) for path, entry in manifest.files.items() if previous.files.get(path) != entry)
        if manifest.sealed != previous.sealed and manifest.sealed:
            yield from self._sealed_list(manifest.sealed)[0].items()

    def _show(self, entries: dict[str, Entry]) -> None:
        for path, entry in entries.items():
            if not path.startswith(HIDDEN):
                self._show_file(self._paths.data / path, self._paths.generations / entry.object)

    def _show_file(self, target: Path, source: Path) -> None:
        self._disk.make_scratch_folder(target.parent)
        if _is_same(target, source):
            return
        link = self._paths.temp_data / "link"
        self._disk.link(source, link)
        self._disk.rename(link, target)

    def _hide(self, names: set[str]) -> None:
        for path in sorted(names):
            if not path.startswith(HIDDEN):
                self._disk.remove(self._paths.data / path)
                self._remove_empty_folders((self._paths.data / path).parent, self._paths.data)

    def _drop(self, manifest: Manifest) -> None:
        """Remove what only the generation before the previous one needed."""
        kept = self.current.objects() | self._parent.objects()
        for name in sorted(manifest.objects() - kept):
            self._remove_object(self._paths.generations / name)
        if manifest.generation:
            self._remove_object(self._paths.generations / str(manifest.generation) / MANIFEST_FILE)

    def _remove_object(self, path: Path) -> None:
        self._disk.remove(path)
        self._remove_empty_folders(path.parent, self._paths.generations)

    def _remove_empty_folders(self, folder: Path, top: Path) -> None:
        while folder != top and folder.is_dir() and not any(folder.iterdir()):
            self._disk.remove_folder(folder)
            folder = folder.parent

    def recover(self, is_needed: Callable[[str], bool]) -> None:
        """Continue from the newest generation whose needed files are intact, and tidy up behind it."""
        named, found = self._named_generation(), self._generations()
        self._next = max([*found, named or 0]) + 1
        damage: list[str] = []
        for generation in self._candidates(named, found):
            manifest = self._read_manifest(generation)
            broken = self._broken(generation, manifest, is_needed)
            if manifest is not None and not broken:
                self._adopt(manifest, named, damage)
                return
            damage += broken
        raise DamagedResults(
            f"No intact commit was found in {self._paths.results}; damaged or missing: "
            f"{', '.join(damage) or 'state.json'}.\n"
            "  Nothing was deleted. fix: restore the folder from a backup, or start again with --reset."
        )

    def _named_generation(self) -> int | None:
        state = read_state(self._paths.state_file)
        return state.generation if state else None

    def _generations(self) -> list[int]:
        names = os.listdir(self._paths.generations) if self._paths.generations.is_dir() else []
        return sorted((int(name) for name in names if name.isascii() and name.isdigit()), reverse=True)

    def _candidates(self, named: int | None, found: list[int]) -> list[int]:
        if named is None:
            LOGGER.warning(
                "%s is missing or damaged; falling back to the newest intact commit.", self._paths.state_file
            )
            named = max(found, default=0)
        older = [number for number in found if number < named and self._manifest_file(number).exists()]
        return [named, *older] if named else []

    def _manifest_file(self, generation: int) -> Path:
        return self._paths.generations / str(generation) / MANIFEST_FILE

    def _read_manifest(self, generation: int) -> Manifest | None:
        return read_manifest(self._manifest_file(generation))

    def _broken(self, generation: int, manifest: Manifest | None, is_needed: Callable[[str], bool]) -> list[str]:
        if manifest is None:
            return [f"generations/{generation}/{MANIFEST_FILE}"]
        needed = {path: entry for path, entry in manifest.files.items() if is_needed(path)}
        needed |= self._latest_sealed(manifest.sealed)
        return [path for path, entry in needed.items() if not self._is_intact(path, entry)]

    def _is_intact(self, path: str, entry: Entry) -> bool:
        """Check a file, and take it back from data/ if it is intact only there."""
        stored, shown = self._paths.generations / entry.object, self._paths.data / path
        if _matches(stored, entry.digest):
            return True
        if not _matches(shown, entry.digest) or stored.exists():
            return False
        self._disk.make_scratch_folder(stored.parent)
        self._disk.link(shown, stored)
        return True

    def _adopt(self, manifest: Manifest, named: int | None, damage: list[str]) -> None:
        if damage:
            LOGGER.error("Damaged: %s. Continuing from commit %d instead.", ", ".join(damage), manifest.generation)
        self.current = manifest
        self._parent = (self._read_manifest(manifest.parent) if manifest.parent else None) or Manifest()
        self._clear_temp_data()
        stored = {path: entry for path, entry in self._all_files().items() if self._is_stored(entry)}
        self._show(stored)
        self._warn_of_pools()
        if named == manifest.generation and not self._has_broken_chain:
            self._sweep()

    def _is_stored(self, entry: Entry) -> bool:
        return (self._paths.generations / entry.object).is_file()

    def _warn_of_pools(self) -> None:
        """Name committed files that nobody reads to go on but whose size shows that they are damaged."""
        sizes = {
            path: (self._paths.generations / entry.object, entry.digest.size)
            for path, entry in self.current.files.items()
        }
        odd = [path for path, (file, size) in sizes.items() if not file.is_file() or file.stat().st_size != size]
        if odd:
            LOGGER.warning("Damaged, but not needed to go on: %s", ", ".join(odd))

    def _clear_temp_data(self) -> None:
        self._disk.make_scratch_folder(self._paths.temp_data)
        for entry in sorted(self._paths.temp_data.iterdir()):
            self._disk.remove_tree(entry)

    def _strays(self) -> list[Path]:
        """Return what neither generation needs: left by an interrupted commit or an interrupted clean-up."""
        manifests = [f"{each.generation}/{MANIFEST_FILE}" for each in (self.current, self._parent)]
        kept = self.current.objects() | self._parent.objects() | set(manifests)
        kept |= {entry.object for _, entry in self._all_sealed()} | set(self._sealed_objects())
        found = sorted(path for path in self._paths.generations.rglob("*") if not path.is_dir())
        return [path for path in found if path.relative_to(self._paths.generations).as_posix() not in kept]

    def _sweep(self) -> None:
        known = [self._read_manifest(generation) for generation in self._generations()]
        names = {path for manifest in known if manifest for path in manifest.files}
        self._hide(names - set(self._all_files()))
        for path in self._strays():
            self._remove_object(path)

    def _sealed_list(self, entry: Entry) -> tuple[dict[str, Entry], Entry | None]:
        listed = read_sealed_list(self._paths.generations / entry.object)
        # Each list is older than the one that names it: a ring of them would never end.
        if listed is None or (listed.previous is not None and listed.previous.generation >= entry.generation):
            LOGGER.error("Damaged: generations/%s. Records listed in it are not looked after any more.", entry.object)
            self._has_broken_chain = True
            return {}, None
        return listed.files, listed.previous

    def _latest_sealed(self, entry: Entry | None) -> dict[str, Entry]:
        """Return the records of the latest epoch, sealed by its training and its evaluation, which a resume reads."""
        found: dict[str, Entry] = {}
        for _ in range(2):
            if entry is not None:
                found[entry.object] = entry
                files, entry = self._sealed_list(entry)
                found |= files
        return found

    def _all_files(self) -> dict[str, Entry]:
        return {**self.current.files, **dict(self._all_sealed())}

    def _all_sealed(self) -> Iterator[tuple[str, Entry]]:
        entry = self.current.sealed
        while entry is not None:
            files, entry = self._sealed_list(entry)
            yield from files.items()

    def _sealed_objects(self) -> Iterator[str]:
        entry = self.current.sealed
        while entry is not None:
            yield entry.object
            _, entry = self._sealed_list(entry)

    def is_settled(self) -> bool:
        """Tell, changing nothing, whether all that follows a commit has been done as well."""
        manifest = self.peek()
        has_leftovers = self._paths.temp_data.is_dir() and any(self._paths.temp_data.iterdir())
        if manifest is None or has_leftovers:
            return False
        self.current = manifest
        self._parent = (self._read_manifest(manifest.parent) if manifest.parent else None) or Manifest()
        shown = {path: entry for path, entry in self._all_files().items() if not path.startswith(HIDDEN)}
        places = [(self._paths.data / path, self._paths.generations / entry.object) for path, entry in shown.items()]
        return not self._strays() and all(_is_same(target, source) for target, source in places)

    def peek(self) -> Manifest | None:
        """Return the current manifest, changing nothing; None if it cannot be read."""
        named = self._named_generation()
        return self._read_manifest(named) if named is not None else None

    def hidden_files(self) -> list[Path]:
        """Return where the files of the running epoch are, in order."""
        hidden = sorted(path for path in self.current.files if path.startswith(HIDDEN))
        return [self._paths.generations / self.current.files[path].object for path in hidden]


def _is_same(target: Path, source: Path) -> bool:
    """Tell whether a name in data/ stands for a stored file: a hard link, or a copy where there are none."""
    if not target.is_file() or not source.is_file():
        return False
    return target.samefile(source) or (target.stat().st_nlink == 1 and Digest.of(target) == Digest.of(source))


def _matches(path: Path, digest: Digest) -> bool:
    """Tell whether a file is what it must be; one that cannot be read is not."""
    try:
        return regular_size(path) == digest.size and Digest.of(path) == digest
    except OSError:
        return False
