"""The results directory as a small transactional store.

    temp_data/<claim>/generation_<k>/   the commit being written by the run that holds the claim
    generations/<k>/                    immutable files that commit k introduced, with its manifest
    state.json                          names the current generation; replacing it is the commit
    data/                               the current generation under its public names, by hard links

A commit writes new files, makes them durable, moves them in one rename next to the older generations and
then replaces state.json. All that comes after, showing the files in data/ and dropping generations that
are not needed any more, can be repeated at any time. At least the two latest commits stay loadable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pipeline.command_lines import verb_line
from pipeline.errors import DamagedResults, PipelineError
from pipeline.paths import STATE_FILE, ExperimentPaths
from pipeline.progress import Progress
from pipeline.store.changes import Changes
from pipeline.store.generations import Generations, matches
from pipeline.store.lock import Claim
from pipeline.store.manifest import (
    MANIFEST_FILE,
    Entry,
    JsonObject,
    Manifest,
    SealedList,
    State,
    entries_outside,
    rename_entries,
    sealed_json,
)
from pipeline.store.public_links import PublicLinks
from pipeline.system.disk import Digest, Disk, Writer, bytes_writer
from pipeline.system.logging import LOGGER

SEALED_FILE = "sealed.json"
_NUM_FULL_COMMITS = 2


@dataclass(frozen=True)
class BegunCommit:
    """A commit whose components have saved: ``staging`` is its folder, ``kept`` are the commits that stay with it.

    The manifest lacks the files, which are known once they are written.
    """

    changes: Changes
    manifest: Manifest
    staging: Path
    kept: list[Manifest]


class ResultsStore:
    """Commits and recovers the state of one experiment on behalf of the run that holds the claim."""

    def __init__(self, paths: ExperimentPaths, disk: Disk, claim: Claim) -> None:
        self._paths = paths
        self._disk = disk
        self.claim = claim
        self._generations = Generations(paths)
        self._links = PublicLinks(paths, disk)
        self.current = Manifest()
        self._older: list[Manifest] = []
        self._next = 1
        self._has_damaged_commit = False

    def set_digests(self, copies: dict[str, str], sources: dict[str, str]) -> None:
        """Take note of the digests of the frozen copy and of what it was copied from; every commit carries them."""
        self.current = replace(self.current, copies=copies, sources=sources)

    def set_fingerprints(self, fingerprints: JsonObject) -> None:
        """Take note of what the datasets look like; every commit carries it."""
        self.current = replace(self.current, fingerprints=fingerprints)

    def commit(self, changes: Changes, progress: Progress, run_state: JsonObject) -> None:
        """Make ``changes`` the current state, whole or not at all."""
        self.complete(self.begin(changes, progress, run_state))

    def begin(self, changes: Changes, progress: Progress, run_state: JsonObject) -> BegunCommit:
        """Let the components save what they are now; ``complete`` does the rest, and may run in a thread.

        Folders of shards are made and left empty: they must be filled below ``staging`` before the commit is completed.
        """
        self.claim.check()
        staging = self.claim.folder / f"generation_{self._next}"
        self._disk.check_room(self._paths.results, changes.num_bytes)
        self._disk.make_scratch_folder(staging, self.claim.folder)
        for folder, save in changes.folders.items():
            self._disk.make_scratch_folder(staging / folder, staging)
            self._disk.perform("save", staging / folder, partial(save, staging / folder))
        for folder in changes.shards:
            self._disk.make_scratch_folder(staging / folder, staging)
        kept = self._commits_to_keep(changes.is_partial)
        manifest = replace(
            self.current,
            generation=self._next,
            older=tuple(older.generation for older in kept),
            is_partial=changes.is_partial,
            progress=progress,
            run_state=run_state,
        )
        return BegunCommit(changes, manifest, staging, kept)

    def _commits_to_keep(self, is_partial: bool) -> list[Manifest]:
        """Return the older commits that stay with a new one: the latest ones, until two of them contain weights."""
        kept = []
        # A partial commit shares its weights with the one before: if these are damaged, both are.
        num_full = 0 if is_partial else 1
        for manifest in [self.current, *self._older] if self.current.generation else []:
            kept.append(manifest)
            num_full += not manifest.is_partial
            if num_full >= _NUM_FULL_COMMITS:
                break
        return kept

    def complete(self, begun: BegunCommit) -> None:
        """Write the files of a commit, make it the current one, and tidy up behind it."""
        try:
            manifest = self._stage(begun)
            self._disk.write(begun.staging / MANIFEST_FILE, bytes_writer(sealed_json(manifest.as_json())))
            # All names must be durable before the rename makes them part of a generation, and the generation before
            # the state names it.
            self._disk.sync_folders(begun.staging)
            self.claim.check()
            self._disk.rename(begun.staging, self._paths.generations / str(manifest.generation))
            self._disk.sync_folder(self._paths.generations)
            self._replace_state(manifest)
            self._settle(manifest, begun.kept)
        except (PipelineError, OSError) as error:
            # If another run has taken over, this says so instead of naming a file that is gone.
            self.claim.check()
            if isinstance(error, PipelineError):
                raise
            raise PipelineError(
                f"A commit could not be completed: {error}. The last commit is intact.\n"
                "  fix: restore access, then run again with --auto."
            ) from error

    def _stage(self, begun: BegunCommit) -> Manifest:
        """Write what is new into the commit's folder; return the manifest with all files."""
        changes = begun.changes
        staging = begun.staging
        files = {path: entry for path, entry in begun.manifest.files.items() if path not in changes.removed}
        for path, writer in changes.files.items():
            files[path] = self._write(staging, path, writer)
        for folder in (*changes.folders, *changes.shards):
            files = entries_outside(files, folder)
            # Components may leave empty folders, which no digest could cover. Their files were not written by us and
            # are made durable here.
            self._disk.remove_all_empty_folders(staging / folder)
            self._disk.remove_empty_folders(staging / folder, staging)
            for file in sorted((staging / folder).rglob("*")):
                if file.is_file():
                    self._disk.sync_file(file)
                    path = file.relative_to(staging).as_posix()
                    files[path] = Entry(f"{self._next}/{path}", Digest.of(file))
        # Last, because a pool may be another name for what this very commit has written.
        for path, other in changes.same_as.items():
            files = {**entries_outside(files, path), **rename_entries(files, other, path)}
        sealed = begun.manifest.sealed
        if changes.sealed:
            entries = {path: self._write(staging, path, writer) for path, writer in changes.sealed.items()}
            document = SealedList(entries, sealed).as_json()
            sealed = self._write(staging, SEALED_FILE, bytes_writer(sealed_json(document)))
        return replace(begun.manifest, files=files, sealed=sealed)

    def _write(self, staging: Path, path: str, writer: Writer) -> Entry:
        self._disk.make_scratch_folder((staging / path).parent, staging)
        return Entry(f"{self._next}/{path}", self._disk.write(staging / path, writer))

    def _replace_state(self, manifest: Manifest) -> None:
        """Name the current generation: this is the commit."""
        state = State(manifest.generation, manifest.progress)
        # The new file lies in this run's claim. A run that takes over has moved that folder away, so the rename fails.
        staging = self.claim.folder / STATE_FILE
        self._disk.replace_file(self._paths.state_file, bytes_writer(sealed_json(state.as_json())), staging)

    def _settle(self, manifest: Manifest, kept: list[Manifest]) -> None:
        """Show a new commit in data/ and drop what is not needed any more; a kill in between is made up for later."""
        previous = self.current
        dropped = [older for older in [previous, *self._older] if older.generation not in manifest.older]
        self._next += 1
        self.current = manifest
        self._older = kept
        # A run that has taken over does the rest, and must not be interfered with.
        self.claim.check()
        changed = {path: entry for path, entry in manifest.files.items() if previous.files.get(path) != entry}
        if manifest.sealed != previous.sealed and manifest.sealed:
            sealed_list = self._generations.sealed_list(manifest.sealed)
            changed |= sealed_list.files if sealed_list else {}
        self._links.show(changed, self.claim.folder)
        self._links.hide(set(previous.files) - set(manifest.files))
        self._drop(dropped)
        if self._has_damaged_commit:
            # The new commit is complete, so the damaged one is not needed any more.
            self._sweep()
            self._has_damaged_commit = False
        if manifest.progress.is_finished:
            # No start follows that would show these names once more if a power cut takes them.
            self._disk.sync_folders(self._paths.data)

    def _drop(self, dropped: list[Manifest]) -> None:
        """Remove what only generations needed that do not stay; sealed files belong to all."""
        kept = {name for manifest in (self.current, *self._older) for name in manifest.objects()}
        for manifest in dropped:
            files = [self._paths.generations / name for name in sorted(manifest.objects() - kept)]
            if manifest.generation:
                files.append(self._generations.manifest_file(manifest.generation))
            for file in files:
                self._disk.remove(file)
                self._disk.remove_empty_folders(file.parent, self._paths.generations)

    def recover(self, is_needed: Callable[[str], bool]) -> None:
        """Continue from the newest generation whose needed files are intact, and tidy up behind it."""
        # Recovery looks at the same manifests and lists from several sides. The commits that follow look at new ones.
        self._generations = Generations(self._paths, remembers=True)
        try:
            self._recover(is_needed)
        finally:
            self._generations = Generations(self._paths)

    def _recover(self, is_needed: Callable[[str], bool]) -> None:
        named = self._generations.read_current_number()
        numbers = self._generations.numbers()
        # A number is never used twice, even if its commit is damaged or was never completed.
        self._next = max([*numbers, named or 0]) + 1
        newest = named
        if newest is None:
            LOGGER.warning(
                "%s is missing or damaged; falling back to the newest intact commit.", self._paths.state_file
            )
            newest = max(numbers, default=0)
        # A folder without a manifest holds files that newer commits still use.
        older = [number for number in numbers if number < newest and self._generations.manifest_file(number).exists()]
        damage: list[str] = []
        for generation in [newest, *older] if newest else []:
            manifest = self._generations.manifest(generation)
            if manifest is None:
                damage.append(f"generations/{generation}/{MANIFEST_FILE}")
                continue
            needed = self._generations.needed_files(manifest, is_needed)
            broken = [path for path, entry in needed.items() if not self._ensure_intact(path, entry)]
            if not broken:
                self._adopt(manifest, named, damage)
                return
            damage += broken
        fsck = verb_line("fsck", self._paths.name, self._paths.home)
        raise DamagedResults(
            f"No intact commit was found in {self._paths.results}; damaged or missing: "
            f"{', '.join(damage) or 'state.json'}.\n"
            "  Nothing was deleted. fix: restore the folder from a backup, or start again with --reset.\n"
            f"  to see what is intact: {fsck}"
        )

    def _ensure_intact(self, path: str, entry: Entry) -> bool:
        """Return whether a file is intact; take it back from data/ if it is missing and intact there."""
        stored = self._generations.stored(entry)
        public = self._generations.public_file(path)
        if matches(stored, entry.digest):
            return True
        if not matches(public, entry.digest) or stored.exists():
            return False
        self._disk.make_scratch_folder(stored.parent, self._paths.generations)
        self._disk.link(public, stored)
        return True

    def _adopt(self, manifest: Manifest, named: int | None, damage: list[str]) -> None:
        """Make a generation the current one of this run, and bring data/ in line with it."""
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
        entries = self._generations.all_files(manifest)
        stored = {path: entry for path, entry in entries.items() if self._generations.stored(entry).is_file()}
        self._links.show(stored, self.claim.folder)
        # Only sizes are compared: to digest every pool would make each start read all weights.
        files = {path: (self._generations.stored(entry), entry.digest.size) for path, entry in manifest.files.items()}
        damaged = [path for path, (file, size) in files.items() if not file.is_file() or file.stat().st_size != size]
        if damaged:
            LOGGER.warning("Damaged, but not needed to continue: %s", ", ".join(damaged))
        # Nothing is deleted on doubt: what was damaged may still be of use to a person.
        if named == manifest.generation and has_whole_chain:
            self._sweep()
        self._has_damaged_commit = named != manifest.generation and has_whole_chain

    def _sweep(self) -> None:
        """Remove all that no generation needs: what interrupted commits and clean-ups have left."""
        known = [self._generations.manifest(generation) for generation in self._generations.numbers()]
        names = {path for manifest in known if manifest for path in manifest.files}
        self._links.hide(names - set(self._generations.all_files(self.current)))
        for path in self._generations.strays([self.current, *self._older]):
            self._disk.remove(path)
        for top in (self._paths.generations, self._paths.data):
            self._disk.remove_all_empty_folders(top)

    def files_to_restore(self, is_needed: Callable[[str], bool]) -> dict[str, Entry]:
        """Return the files of the current commit that a continuing run reads, by path below data/."""
        return self._generations.needed_files(self.current, is_needed)


def read_current_manifest(paths: ExperimentPaths, generation: int | None = None) -> Manifest | None:
    """Return the current manifest, changing nothing; None if it cannot be read.

    A caller that has read the state file already gives the generation that it names.
    """
    generations = Generations(paths)
    named = generations.read_current_number() if generation is None else generation
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
    return PublicLinks(paths, Disk()).is_complete(generations.all_files(manifest))
