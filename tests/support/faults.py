"""Disks that fail or die at a chosen operation."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

from pipeline.system.disk import Disk

Result = TypeVar("Result")


class Killed(BaseException):
    """The process is gone: nothing may catch this and go on writing."""


class CountingDisk(Disk):
    """Counts operations, so that a campaign knows how many there are to put a fault at."""

    def __init__(self) -> None:
        self.operations: list[tuple[str, Path]] = []

    def perform(self, operation: str, path: Path, action: Callable[[], Result]) -> Result:
        self.operations.append((operation, path))
        return super().perform(operation, path, action)


class KillingDisk(CountingDisk):
    """Dies at the n-th operation: before it, after it, or in the middle of what it writes."""

    def __init__(self, kill_at: int, moment: str) -> None:
        super().__init__()
        self._kill_at, self._moment, self._is_dead = kill_at, moment, False

    def perform(self, operation: str, path: Path, action: Callable[[], Result]) -> Result:
        if self._is_dead:
            raise Killed
        if len(self.operations) + 1 < self._kill_at:
            return super().perform(operation, path, action)
        self._is_dead = True
        if self._moment != "before":
            super().perform(operation, path, action)
        if self._moment == "torn" and operation == "write":
            os.truncate(path, path.stat().st_size // 2)
        if self._moment == "torn" and operation == "save":
            for file in path.rglob("*.json"):
                os.truncate(file, file.stat().st_size // 2)
        raise Killed


class FailingDisk(CountingDisk):
    """Refuses the n-th operation, and all that follow if asked to, with an error of the operating system."""

    def __init__(self, fail_at: int, code: int = errno.ENOSPC, *, for_ever: bool = False) -> None:
        super().__init__()
        self._fail_at, self._code, self._for_ever = fail_at, code, for_ever

    def perform(self, operation: str, path: Path, action: Callable[[], Result]) -> Result:
        number = len(self.operations) + 1
        is_hit = number == self._fail_at or (self._for_ever and number > self._fail_at)
        return super().perform(operation, path, self._refuse if is_hit else action)

    def _refuse(self) -> NoReturn:
        raise OSError(self._code, os.strerror(self._code))


class StutteringDisk(CountingDisk):
    """Interrupts the n-th operation once, and takes only a part of what is written there."""

    def __init__(self, stutter_at: int, code: int) -> None:
        super().__init__()
        self._stutter_at, self._code = stutter_at, code

    def perform(self, operation: str, path: Path, action: Callable[[], Result]) -> Result:
        is_first = len(self.operations) + 1 == self._stutter_at

        def interrupted() -> Result:
            nonlocal is_first
            if is_first:
                is_first = False
                raise OSError(self._code, os.strerror(self._code))
            return action()

        return super().perform(operation, path, interrupted)

    def write_some(self, descriptor: int, content: memoryview) -> int:
        is_here = len(self.operations) == self._stutter_at
        return super().write_some(descriptor, content[: max(1, len(content) // 3)] if is_here else content)


class PowerCutDisk(CountingDisk):
    """Loses power after the n-th operation; ``survivors`` then tells what a strict file system has kept.

    The content of a file survives as it was at its last sync, and a name as it was when its folder was last synced.
    Inode numbers tell files and folders apart whatever they are called, and the folder in memory never uses one twice.
    """

    def __init__(self, top: Path, cut_at: int) -> None:
        super().__init__()
        self._top, self._cut_at = top, cut_at
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._folders: set[int] = set()
        # What stood under a name before the latest rename to it that is not synced, by folder and name.
        self._replaced: dict[tuple[int, str], int] = {}
        for path in [top, *top.rglob("*")]:
            self._sync_names(path) if path.is_dir() else self._sync_content(path)

    def perform(self, operation: str, path: Path, action: Callable[[], Result]) -> Result:
        if len(self.operations) >= self._cut_at:
            raise Killed
        if operation == "rename to" and path.is_file():
            self._replaced[path.parent.stat().st_ino, path.name] = path.stat().st_ino
        result = super().perform(operation, path, action)
        if operation == "sync":
            self._sync_content(path)
        if operation == "sync folder":
            self._sync_names(path)
        if len(self.operations) == self._cut_at:
            raise Killed
        return result

    def _sync_content(self, path: Path) -> None:
        self._contents[path.stat().st_ino] = path.read_bytes()

    def _sync_names(self, path: Path) -> None:
        # Files for onlookers come and go beside the disk.
        entries = {entry.name: entry.lstat() for entry in path.iterdir() if "status.json" not in entry.name}
        folder = path.stat().st_ino
        self._names[folder] = {name: facts.st_ino for name, facts in entries.items()}
        self._replaced = {place: inode for place, inode in self._replaced.items() if place[0] != folder}
        self._folders |= {facts.st_ino for facts in entries.values() if stat.S_ISDIR(facts.st_mode)}

    def survivors(self, how: str, target: Path) -> None:
        """Build what is found after the power cut in ``target``.

        ``data``: unsynced content is gone, all names are there; ``zeros``: the same, with zeros in its place;
        ``names``: unsynced names are gone or back as well; ``creations``: of these, only removals have survived;
        ``replaced``: all names are there, but those that were renamed to and not synced stand for what they stood for.
        """
        self._built: dict[int, Path] = {}
        if how in ("data", "zeros", "replaced"):
            self._copy_present(self._top, target, how)
        else:
            self._copy_synced(self._top.stat().st_ino, self._top if how == "creations" else None, target)

    def _copy_present(self, folder: Path, target: Path, how: str) -> None:
        target.mkdir()
        for entry in folder.iterdir():
            if "status.json" in entry.name:
                continue
            if entry.is_dir():
                self._copy_present(entry, target / entry.name, how)
            else:
                lost = bytes(entry.stat().st_size) if how == "zeros" else b""
                replaced = self._replaced if how == "replaced" else {}
                inode = replaced.get((folder.stat().st_ino, entry.name), entry.stat().st_ino)
                self._put(inode, target / entry.name, lost)

    def _copy_synced(self, inode: int, present: Path | None, target: Path) -> None:
        target.mkdir()
        for name, child in self._names.get(inode, {}).items():
            if present is not None and not (present / name).exists():
                continue
            if child in self._folders:
                self._copy_synced(child, present / name if present is not None else None, target / name)
            else:
                self._put(child, target / name, b"")

    def _put(self, inode: int, target: Path, lost: bytes) -> None:
        if inode in self._built:
            os.link(self._built[inode], target)
            return
        target.write_bytes(self._contents.get(inode, lost))
        self._built[inode] = target
