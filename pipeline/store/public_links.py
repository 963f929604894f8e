"""Public names: what ``data/`` shows of the current generation, by hard links."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pipeline.paths import ExperimentPaths
from pipeline.store.generations import HIDDEN, is_same
from pipeline.store.manifest import Entry
from pipeline.system.disk import Disk


class PublicLinks:
    """Shows and hides names; all of it can be repeated at any time, because the generations have the bytes."""

    def __init__(self, paths: ExperimentPaths, disk: Disk) -> None:
        self._paths = paths
        self._disk = disk

    def show(self, entries: dict[str, Entry], staging: Path) -> None:
        """Give every file its public name; ``staging`` is a folder of this run on the same file system."""
        link = staging / "link"
        for path, entry in entries.items():
            if path.startswith(HIDDEN):
                continue
            target = self._paths.data / path
            source = self._paths.generations / entry.object
            self._disk.make_scratch_folder(target.parent, self._paths.data)
            if not is_same(target, source):
                # A link cannot replace a name, a rename can: the public name leads to the old or the new file, always.
                self._disk.link(source, link)
                self._disk.rename(link, target)

    def hide(self, names: Iterable[str]) -> None:
        """Take names away, and the folders that become empty."""
        for path in sorted(names):
            if not path.startswith(HIDDEN):
                self._disk.remove(self._paths.data / path)
                self._disk.remove_empty_folders((self._paths.data / path).parent, self._paths.data)

    def is_complete(self, entries: dict[str, Entry]) -> bool:
        """Return whether every file has its public name; changes nothing."""
        return all(
            is_same(self._paths.data / path, self._paths.generations / entry.object)
            for path, entry in entries.items()
            if not path.startswith(HIDDEN)
        )
