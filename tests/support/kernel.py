"""What the kernel is really asked to sync: every ``os.fsync`` compared with what was written and promised."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

Sync = Callable[[int], None]


class Kernel:
    """Remembers what was synced, and finds commits that a power cut could take back.

    A file is safe once its inode was synced with the size and the time stamp that it has. A name is safe once its
    folder was synced while it held that name. Both must hold for all of a commit when ``state.json`` is replaced, and
    the folder of ``state.json`` must be synced before anything is removed or shown on the strength of it.
    """

    def __init__(self, results: Path) -> None:
        self._results = results
        self._files: dict[int, tuple[int, int]] = {}
        self._folders: dict[int, set[str]] = {}
        self._is_promised = True
        self.num_commits = 0
        self.violations: list[str] = []

    def synced(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        if not stat.S_ISDIR(found.st_mode):
            self._files[found.st_ino] = (found.st_size, found.st_mtime_ns)
            return
        self._folders[found.st_ino] = set(os.listdir(f"/proc/self/fd/{descriptor}"))
        if self._results.exists() and found.st_ino == self._results.stat().st_ino:
            self._is_promised = True

    def replaced(self, source: Path, target: Path) -> None:
        """Called before a rename."""
        if target == self._results / "state.json":
            self.num_commits += 1
            self._check_file(source)
            generation = json.loads(source.read_text())["generation"]
            self._check_commit(self._results / "generations" / str(generation))
        else:
            self.relied_on("renamed", target)

    def has_replaced(self, target: Path) -> None:
        """Called after a rename."""
        if target == self._results / "state.json":
            self._is_promised = False

    def relied_on(self, what: str, path: Path) -> None:
        if not self._is_promised and self._results in path.parents:
            self.violations.append(f"{path} was {what} before the new state.json was safe")

    def _check_commit(self, folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        objects = {entry[0] for entry in manifest["files"].values()} | {f"{folder.name}/manifest.json"}
        for name in sorted(objects):
            path = folder.parent / name
            self._check_file(path)
            while path != self._results:
                self._check_name(path)
                path = path.parent

    def _check_file(self, path: Path) -> None:
        found = path.stat()
        if self._files.get(found.st_ino) != (found.st_size, found.st_mtime_ns):
            self.violations.append(f"the content of {path} was never synced as it is")

    def _check_name(self, path: Path) -> None:
        if path.name not in self._folders.get(path.parent.stat().st_ino, ()):
            self.violations.append(f"the name of {path} was never synced")


@contextmanager
def watched_kernel(
    monkeypatch: pytest.MonkeyPatch, results: Path, mutate: Callable[[Sync], Sync] | None = None
) -> Iterator[Kernel]:
    """Watch what this process asks of the kernel; ``mutate`` may keep requests from reaching it."""
    kernel = Kernel(results)
    fsync, replace, link, unlink = os.fsync, os.replace, os.link, Path.unlink

    def sync(descriptor: int) -> None:
        fsync(descriptor)
        kernel.synced(descriptor)

    def watched_replace(source: Path, target: Path) -> None:
        kernel.replaced(Path(source), Path(target))
        replace(source, target)
        kernel.has_replaced(Path(target))

    def watched_link(source: Path, target: Path) -> None:
        kernel.relied_on("linked", Path(target))
        link(source, target)

    def watched_unlink(path: Path, missing_ok: bool = False) -> None:
        kernel.relied_on("removed", path)
        unlink(path, missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", mutate(sync) if mutate else sync)
        patched.setattr(os, "replace", watched_replace)
        patched.setattr(os, "link", watched_link)
        patched.setattr(Path, "unlink", watched_unlink)
        yield kernel
