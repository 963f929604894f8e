"""The results directory as a small transactional store.

    temp_data/<claim>/generation_<k>/   the commit being written by the run that holds the claim
    generations/<k>/                    immutable files that commit k introduced, with its manifest
    state.json                          names the current generation; replacing it is the commit
    data/                               the current generation under its public names, by hard links

A commit writes new files, makes them durable, moves them in one rename next to the older generations and
then replaces state.json. All that comes after, showing the files in data/ and dropping generations that
is not needed any more, can be repeated at any time. At least the two latest commits stay loadable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.arguments import verb_line
from pipeline.errors import DamagedResults, PipelineError
from pipeline.paths import ExperimentPaths
from pipeline.progress import Progress
from pipeline.store.changes import Changes
from pipeline.store.generations import Generations, matches
from pipeline.store.lock import Claim
from pipeline.store.manifest import MANIFEST_FILE, Entry, Manifest, SealedList, State, outside, renamed, sealed_json
from pipeline.store.public_links import View
from pipeline.system.disk import Digest, Disk, bytes_writer
from pipeline.system.logging import LOGGER

SEALED_FILE = "sealed.json"
_NUM_FULL_COMMITS = 2


class ResultsStore:
    """Commits and recovers the state of one experiment on behalf of the run that holds the claim."""

    def __init__(self, paths: ExperimentPaths, disk: Disk, claim: Claim) -> None:
        self._paths = paths
        self._disk = disk
        self.claim = claim
        self._generations = Generations(paths)
        self._view = View(paths, disk)
        self.current = Manifest()
        self._older: list[Manifest] = []
        self._next = 1
        self._has_damaged_commit = False

    def set_digests(self, copies: dict[str, str], sources: dict[str, str]) -> None:
        """Take note of the digests of the frozen copy and of what it was copied from; every commit carries them."""
        self.current = replace(self.current, copies=copies, sources=sources)

    def set_fingerprints(self, fingerprints: dict[str, Any]) -> None:
        """Take note of what the datasets look like; every commit carries it."""
        self.current = replace(self.current, fingerprints=fingerprints)

    @property
    def staging(self) -> Path:
        """Where the next commit is written."""
        return self.claim.folder / f"generation_{self._next}"

    def commit(self, changes: Changes, progress: Progress, run_state: dict[str, Any]) -> None:
        """Make ``changes`` the current state, whole or not at all."""
        self.begin(changes, progress, run_state)()

    def begin(self, changes: Changes, progress: Progress, run_state: dict[str, Any]) -> Callable[[], None]:
        """Let the components save what they are now; return the rest of the commit, which may run in a thread.

        Folders of shards are made and left empty: they must be filled below ``staging`` before the rest begins.
        """
        self.claim.check()
        staging = self.staging
        self._disk.check_room(self._paths.results, changes.num_bytes)
        self._disk.make_scratch_folder(staging, self.claim.folder)
        for folder, save in changes.folders.items():
            self._disk.make_scratch_folder(staging / folder, staging)
            self._disk.perform("save", staging / folder, partial(save, staging / folder))
        for folder in changes.shards:
            self._disk.make_scratch_folder(staging / folder, staging)
        kept = self._kept(changes.is_partial)
        manifest = replace(
            self.current,
            generation=self._next,
            older=tuple(one.generation for one in kept),
            is_partial=changes.is_partial,
            progress=progress,
            run_state=run_state,
        )
        return lambda: self._guard(lambda: self._complete(changes, manifest, staging, kept))

    def _guard(self, action: Callable[[], None]) -> None:
        """Act; if that fails because another run has taken over, say so instead of naming a file that is gone."""
        try:
            action()
        except (PipelineError, OSError) as error:
            self.claim.check()
            if isinstance(error, PipelineError):
                raise
            raise PipelineError(
                f"A commit could not be completed: {error}. The last commit is intact.\n"
                "  fix: restore access, then run again with --auto."
            ) from error

    def _kept(self, is_partial: bool) -> list[Manifest]:
        """Return the older commits that stay with a new one: the latest, and on until two have weights of their own.

        A commit that shares its weights with the one before is not safer than that.
        """
        kept = []
        num_full = 0 if is_partial else 1
        for manifest in [self.current, *self._older] if self.current.generation else []:
            kept.append(manifest)
            num_full += not manifest.is_partial
            if num_full >= _NUM_FULL_COMMITS:
                break
        return kept

    def _complete(self, changes: Changes, manifest: Manifest, staging: Path, kept: list[Manifest]) -> None:
        manifest = self._stage(changes, manifest, staging)
        self._disk.write(staging / MANIFEST_FILE, bytes_writer(sealed_json(manifest.as_json())))
        self._disk.sync_folders(staging)
        self.claim.check()
        self._disk.rename(staging, self._paths.generations / str(manifest.generation))
        self._disk.sync_folder(self._paths.generations)
        self._replace_state(manifest)
        self._next += 1
        previous = self.current
        dropped = [one for one in [previous, *self._older] if one.generation not in manifest.older]
        self.current = manifest
        self._older = kept
        # A run that has taken over does the rest, and must not be interfered with.
        self.claim.check()
        self._view.show(dict(self._changed(previous, manifest)), self.claim.folder)
        self._view.hide(set(previous.files) - set(manifest.files))
        self._drop(dropped)
        if self._has_damaged_commit:
            # The new commit is complete, so the damaged one is not needed any more.
            self._sweep()
            self._has_damaged_commit = False
        if manifest.progress.is_finished:
            self._disk.sync_folders(self._paths.data)

    def _stage(self, changes: Changes, manifest: Manifest, staging: Path) -> Manifest:
        files = {path: entry for path, entry in manifest.files.items() if path not in changes.removed}
        for path, writer in changes.files.items():
            files[path] = self._write(staging, path, writer)
        for folder in (*changes.folders, *changes.shards):
            files = outside(files, folder)
            files.update(self._saved_folder(staging, folder))
        for path, other in changes.same_as.items():
            files = {**outside(files, path), **dict(renamed(files, other, path))}
        return replace(manifest, files=files, sealed=self._stage_sealed(changes, manifest, staging))

    def _stage_sealed(self, changes: Changes, manifest: Manifest, staging: Path) -> Entry | None:
        if not changes.sealed:
            return manifest.sealed
        entries = {path: self._write(staging, path, writer) for path, writer in changes.sealed.items()}
        listed = SealedList(entries, manifest.sealed)
        return self._write(staging, SEALED_FILE, bytes_writer(sealed_json(listed.as_json())))

    def _write(self, staging: Path, path: str, writer: Callable[[Any], None]) -> Entry:
        self._disk.make_scratch_folder((staging / path).parent, staging)
        return Entry(f"{self._next}/{path}", self._disk.write(staging / path, writer))

    def _saved_folder(self, staging: Path, folder: str) -> Iterator[tuple[str, Entry]]:
        """Make durable whatever a component wrote."""
        self._disk.remove_all_empty_folders(staging / folder)
        self._disk.remove_empty_folders(staging / folder, staging)
        for path in sorted((staging / folder).rglob("*")):
            if path.is_file():
                self._disk.sync_file(path)
                name = path.relative_to(staging).as_posix()
                yield name, Entry(f"{self._next}/{name}", Digest.of(path))

    def _replace_state(self, manifest: Manifest) -> None:
        """The commit itself; it takes a file of this run's claim, which a run that takes over has removed first."""
        state = State(manifest.generation, manifest.progress)
        staging = self.claim.folder / "state.json"
        self._disk.replace_file(self._paths.state_file, bytes_writer(sealed_json(state.as_json())), staging)

    def _changed(self, previous: Manifest, manifest: Manifest) -> Iterator[tuple[str, Entry]]:
        """Yield what differs from the commit before: new files, and new names for older ones."""
        yield from ((path, entry) for path, entry in manifest.files.items() if previous.files.get(path) != entry)
        if manifest.sealed != previous.sealed and manifest.sealed:
            listed = self._generations.sealed_list(manifest.sealed)
            yield from listed.files.items() if listed else ()

    def _drop(self, dropped: list[Manifest]) -> None:
        """Remove what only generations needed that do not stay; sealed files belong to all."""
        kept = {name for manifest in (self.current, *self._older) for name in manifest.objects()}
        for manifest in dropped:
            for name in sorted(manifest.objects() - kept):
                self._remove_object(self._paths.generations / name)
            if manifest.generation:
                self._remove_object(self._generations.manifest_file(manifest.generation))

    def _remove_object(self, path: Path) -> None:
        self._disk.remove(path)
        self._disk.remove_empty_folders(path.parent, self._paths.generations)

    def recover(self, is_needed: Callable[[str], bool]) -> None:
        """Continue from the newest generation whose needed files are intact, and tidy up behind it."""
        named = self._generations.named()
        found = self._generations.numbers()
        self._next = max([*found, named or 0]) + 1
        damage: list[str] = []
        for generation in self._candidates(named, found):
            manifest = self._generations.manifest(generation)
            broken = self._broken(generation, manifest, is_needed)
            if manifest is not None and not broken:
                self._adopt(manifest, named, damage)
                return
            damage += broken
        fsck = verb_line("fsck", self._paths.name, self._paths.home)
        raise DamagedResults(
            f"No intact commit was found in {self._paths.results}; damaged or missing: "
            f"{', '.join(damage) or 'state.json'}.\n"
            f"  Nothing was deleted. fix: {fsck} shows what is intact; "
            "restore the folder from a backup, or start again with --reset."
        )

    def _candidates(self, named: int | None, found: list[int]) -> list[int]:
        if named is None:
            LOGGER.warning(
                "%s is missing or damaged; falling back to the newest intact commit.", self._paths.state_file
            )
            named = max(found, default=0)
        older = [number for number in found if number < named and self._generations.manifest_file(number).exists()]
        return [named, *older] if named else []

    def _broken(self, generation: int, manifest: Manifest | None, is_needed: Callable[[str], bool]) -> list[str]:
        if manifest is None:
            return [f"generations/{generation}/{MANIFEST_FILE}"]
        needed = self._generations.needed(manifest, is_needed)
        return [path for path, entry in needed.items() if not self._is_intact(path, entry)]

    def _is_intact(self, path: str, entry: Entry) -> bool:
        """Check a file, and take it back from data/ if it is intact only there."""
        stored = self._generations.stored(entry)
        shown = self._generations.shown(path)
        if matches(stored, entry.digest):
            return True
        if not matches(shown, entry.digest) or stored.exists():
            return False
        self._disk.make_scratch_folder(stored.parent, self._paths.generations)
        self._disk.link(shown, stored)
        return True

    def _adopt(self, manifest: Manifest, named: int | None, damage: list[str]) -> None:
        if damage:
            LOGGER.error(
                "Damaged: %s. Continuing from commit %d (%s) instead.",
                ", ".join(damage),
                manifest.generation,
                manifest.progress,
            )
        # Either may be missing from a copy of the results.
        for folder in (self._paths.data, self._paths.generations):
            self._disk.make_folder(folder)
        self.current = manifest
        self._older = self._generations.older(manifest)
        has_whole_chain = self._generations.has_whole_chain(manifest)
        if not has_whole_chain:
            LOGGER.error("The index of older records is damaged; the files are kept, but no longer verified.")
        if named is None and not damage:
            self._replace_state(manifest)
            named = manifest.generation
        stored = {path: one for path, one in self._generations.all_files(manifest).items() if self._is_stored(one)}
        self._view.show(stored, self.claim.folder)
        self._warn_of_pools()
        # Nothing is deleted on doubt: what was damaged may still be of use to a person.
        if named == manifest.generation and has_whole_chain:
            self._sweep()
        self._has_damaged_commit = named != manifest.generation and has_whole_chain

    def _is_stored(self, entry: Entry) -> bool:
        return self._generations.stored(entry).is_file()

    def _warn_of_pools(self) -> None:
        """Log committed files that a resume does not read but whose size shows that they are damaged."""
        sizes = {path: (self._generations.stored(one), one.digest.size) for path, one in self.current.files.items()}
        odd = [path for path, (file, size) in sizes.items() if not file.is_file() or file.stat().st_size != size]
        if odd:
            LOGGER.warning("Damaged, but not needed to continue: %s", ", ".join(odd))

    def _sweep(self) -> None:
        known = [self._generations.manifest(generation) for generation in self._generations.numbers()]
        names = {path for manifest in known if manifest for path in manifest.files}
        self._view.hide(names - set(self._generations.all_files(self.current)))
        for path in self._generations.strays([self.current, *self._older]):
            self._disk.remove(path)
        for top in (self._paths.generations, self._paths.data):
            self._disk.remove_all_empty_folders(top)

    def files_to_restore(self, is_needed: Callable[[str], bool]) -> dict[str, Entry]:
        """Return the files of the current commit that a continuing run reads, by path below data/."""
        return self._generations.needed(self.current, is_needed)


def read_current_manifest(paths: ExperimentPaths) -> Manifest | None:
    """Return the current manifest, changing nothing; None if it cannot be read."""
    generations = Generations(paths)
    named = generations.named()
    return generations.manifest(named) if named is not None else None


def is_settled(paths: ExperimentPaths) -> bool:
    """Return whether all that follows a commit has been done as well; changes nothing."""
    manifest = read_current_manifest(paths)
    generations = Generations(paths)
    has_leftovers = paths.temp_data.is_dir() and any(paths.temp_data.iterdir())
    if manifest is None or has_leftovers:
        return False
    if generations.strays([manifest, *generations.older(manifest)]):
        return False
    return View(paths, Disk()).is_complete(generations.all_files(manifest))
