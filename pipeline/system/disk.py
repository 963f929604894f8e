"""The one durable seam: every change to the results passes through ``Disk``.

``Disk.perform`` runs each single operation. Tests replace it to kill, refuse, interrupt or cut the power there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import io
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from pipeline.errors import PipelineError
from pipeline.system.formatting import shown_bytes

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

Result = TypeVar("Result")
Writer = Callable[[BinaryIO], None]
_BUFFER_BYTES = 1 << 20
# A large tensor is written in parts of this size, so that digesting and storing one overlaps with writing the next.
_MAX_WRITE_BYTES = 8 << 20
# Written bytes go to the digest thread in parts of this size. Between two parts that thread needs the interpreter lock,
# which the training has to wait for: fewer, larger parts cost the training less.
_DIGEST_PART_BYTES = 4 << 20
_MAX_ATTEMPTS_TO_EMPTY = 5
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_SECONDS_BETWEEN_ATTEMPTS = 0.001
# Background threads are this much "nicer" than the training; 19 is the lowest priority that Linux knows.
_NICE_INCREMENT = 10
_MAX_NICE = 19
# SYNC_FILE_RANGE_WRITE of sync_file_range(2): start writing back a range, and do not wait for it.
_START_WRITEBACK = 2
# Python has no binding. None where the C library lacks it: then the final fsync does all the work.
_SYNC_FILE_RANGE = getattr(ctypes.CDLL(None), "sync_file_range", None)


def low_priority_executor(name: str) -> ThreadPoolExecutor:
    """Return an executor with one background thread that yields to the training when cores are scarce."""
    return ThreadPoolExecutor(1, thread_name_prefix=name, initializer=_lower_thread_priority)


def _lower_thread_priority() -> None:
    # Only Linux has priorities per thread. Where changing one is not allowed, the work is done at the normal priority.
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            nice = os.getpriority(os.PRIO_PROCESS, thread) + _NICE_INCREMENT
            os.setpriority(os.PRIO_PROCESS, thread, min(_MAX_NICE, nice))


# One thread: the parts of a file must reach its digest in order.
_DIGEST_EXECUTOR = low_priority_executor("digest")


@dataclass(frozen=True)
class Digest:
    """Size and SHA-256 of the content that a file must have."""

    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Digest:
        with path.open("rb") as file:
            return cls.of_file(file)

    @classmethod
    def of_file(cls, file: BinaryIO) -> Digest:
        """Return the digest of an open file from its current position to its end."""
        sha = hashlib.sha256()
        size = 0
        while chunk := file.read(_BUFFER_BYTES):
            sha.update(chunk)
            size += len(chunk)
        return cls(size, sha.hexdigest())


class Disk:
    """Changes of the file system. A method that promises durability has synced when it returns."""

    # Size of the commit in progress, for the message about a full disk.
    num_needed_bytes = 0

    def perform(self, operation: str, path: Path, action: Callable[[], Result]) -> Result:
        """Run one change. Every change passes here, so that a test can inject a fault at any of them."""
        while True:
            try:
                return action()
            except (InterruptedError, BlockingIOError):
                # Nothing has changed yet: a signal arrived, or the file system was busy.
                time.sleep(_SECONDS_BETWEEN_ATTEMPTS)
            except OSError as error:
                # Never repeated, above all not an fsync: after a failed one the kernel may have dropped the data, and
                # a second fsync would succeed without it.
                space = self._describe_space(path) if error.errno in _NO_SPACE else ""
                raise PipelineError(
                    f"Could not {operation} {path}: {error.strerror or error}{space}. The last commit is intact.\n"
                    "  fix: free space or restore access, then run again with --auto."
                ) from error

    def _describe_space(self, path: Path) -> str:
        # ENOSPC also means that no inodes are left. Without this, the message would show free space on a "full" disk.
        if self.free_inodes(path) == 0:
            return " (no inodes are free: the file system cannot hold more files, however small)"
        needed = f"{shown_bytes(self.num_needed_bytes)} needed, " if self.num_needed_bytes else ""
        return f" ({needed}{shown_bytes(self.free_bytes(path))} free)"

    def free_bytes(self, path: Path) -> int:
        """Return the free space of the file system on which ``path`` is or will be."""
        return shutil.disk_usage(_nearest_existing(path)).free

    def free_inodes(self, path: Path) -> int | None:
        """Return how many more files can be created there; None if the file system has no fixed number of inodes."""
        statistics = os.statvfs(_nearest_existing(path))
        # btrfs, for one, reports 0 of 0.
        return statistics.f_favail if statistics.f_files else None

    def check_room(self, path: Path, num_bytes: int) -> None:
        """Refuse a commit of ``num_bytes`` that cannot fit, before any of it is written."""
        self.num_needed_bytes = num_bytes
        free = self.free_bytes(path)
        if num_bytes > free:
            raise PipelineError(
                f"The next commit needs {shown_bytes(num_bytes)} in {path}, but {shown_bytes(free)} are free. "
                "The last commit is intact.\n  fix: free space, then run again with --auto."
            )

    def write(self, path: Path, writer: Writer) -> Digest:
        """Write a new file and make its content durable; its name is durable once its folder is synced."""
        raw = self.perform("create", path, partial(_RawFile, self, path))
        with io.BufferedWriter(raw, _BUFFER_BYTES) as file:
            writer(file)
            # fsync sees only what has left Python's buffer.
            file.flush()
            self.perform("sync", path, partial(os.fsync, raw.descriptor))
            return raw.digest()

    def write_some(self, descriptor: int, content: memoryview) -> int:
        """Write as much as the kernel takes and return the number of bytes; tests replace it by short writes."""
        return os.write(descriptor, content)

    def replace_file(self, path: Path, writer: Writer, staging: Path) -> Digest:
        """Replace a file in one atomic, durable step; ``staging`` must be on the same file system."""
        # A killed run may have left its staging file, and ``write`` only creates new files.
        if staging.exists():
            self.remove(staging)
        digest = self.write(staging, writer)
        self.rename(staging, path)
        # Before this sync a power cut may bring the old file back.
        self.sync_folder(path.parent)
        return digest

    def make_folder(self, path: Path) -> None:
        """Create a folder and its missing parents; each name is durable."""
        if path.is_dir():
            return
        self.make_folder(path.parent)
        # Another start may create the same folder between the check and this line.
        self.perform("create folder", path, partial(path.mkdir, exist_ok=True))
        self.sync_folder(path.parent)

    def make_scratch_folder(self, path: Path, top: Path) -> None:
        """Create a folder and its missing parents below ``top``, which exists; names need not survive a power cut."""
        if path == top or path.is_dir():
            return
        self.make_scratch_folder(path.parent, top)
        # Not synced: what becomes permanent is synced as a tree later (``sync_folders``), the rest is thrown away.
        self.perform("create folder", path, partial(path.mkdir, exist_ok=True))

    def rename(self, source: Path, target: Path) -> None:
        self.perform("rename to", target, partial(os.replace, source, target))

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name; copy it where the file system has no hard links."""

        def link_or_copy() -> None:
            try:
                os.link(source, target)
            except FileExistsError:
                # Not a lack of hard links: a copy would overwrite the file of that name.
                raise
            except OSError:
                shutil.copyfile(source, target)

        self.perform("link", target, link_or_copy)

    def remove(self, path: Path) -> None:
        self.perform("remove", path, partial(path.unlink, missing_ok=True))

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder; that another run has just removed it is not an error."""

        def remove_if_present() -> None:
            with contextlib.suppress(FileNotFoundError):
                path.rmdir()

        self.perform("remove folder", path, remove_if_present)

    def remove_empty_folders(self, folder: Path, top: Path) -> None:
        """Remove a folder if it is empty, then its parents below ``top`` while they are empty."""
        while folder != top and folder.is_dir() and not any(folder.iterdir()):
            self.remove_folder(folder)
            folder = folder.parent

    def remove_all_empty_folders(self, top: Path) -> None:
        """Remove every folder below ``top`` that holds no file at any depth."""
        # In reverse order, children come before their parents.
        for path in sorted(top.rglob("*"), reverse=True):
            if path.is_dir():
                self.remove_empty_folders(path, top)

    def remove_tree(self, path: Path) -> bool:
        """Remove a file or a folder with its content, without following links; return whether nothing is left.

        On NFS, a removed file that a process on this machine has open is renamed to ``.nfs…`` and stays until it is
        closed. Such files and their folders are left.
        """
        if path.is_symlink() or not path.is_dir():
            self.remove(path)
            return True
        # More than once: a run that is being refused right now may still add a file of its own.
        for _ in range(_MAX_ATTEMPTS_TO_EMPTY):
            removals = [self.remove_tree(entry) for entry in _entries(path) if not _is_held_by_nfs(entry)]
            remaining = _entries(path)
            if not all(removals) or any(map(_is_held_by_nfs, remaining)):
                return False
            if not remaining:
                break
        self.remove_folder(path)
        return True

    def sync_file(self, path: Path) -> None:
        self.perform("sync", path, partial(_sync, path, os.O_RDWR))

    def sync_folder(self, path: Path) -> None:
        self.perform("sync folder", path, partial(_sync, path, os.O_RDONLY | os.O_DIRECTORY))

    def sync_folders(self, top: Path) -> None:
        """Make all names in a tree of folders durable, deepest first."""
        for path, _, _ in os.walk(top, topdown=False):
            self.sync_folder(Path(path))


class _RawFile(io.RawIOBase):
    """An unbuffered file whose writes pass through ``Disk.perform`` and are digested in a background thread."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self._path = path
        self._sha = hashlib.sha256()
        self._size = 0
        self._num_queued_bytes = 0
        self._queued_digests = list[Future[None]]()
        self._buffer = memoryview(b"")
        # O_EXCL: committed files are never opened for writing again. O_RDWR: the digest thread reads them back.
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer) -> int:
        """Write as much as the kernel takes at once; ``BufferedWriter`` calls again with the rest."""
        content = memoryview(data).cast("B")[:_MAX_WRITE_BYTES]
        count = self._disk.perform("write", self._path, partial(self._disk.write_some, self.descriptor, content))
        self._size += count
        num_new_bytes = self._size - self._num_queued_bytes
        if num_new_bytes >= _DIGEST_PART_BYTES:
            # Start writing these bytes to the disk now, so that little is left for the final fsync. Errors are ignored
            # because they do not matter here: only that fsync makes the file durable.
            if _SYNC_FILE_RANGE is not None:
                offset = ctypes.c_int64(self._num_queued_bytes)
                _SYNC_FILE_RANGE(self.descriptor, offset, ctypes.c_int64(num_new_bytes), _START_WRITEBACK)
            self._queued_digests.append(_DIGEST_EXECUTOR.submit(self._digest, self._num_queued_bytes, self._size))
            self._num_queued_bytes = self._size
        return count

    def _digest(self, start: int, end: int) -> None:
        """Add a range of the file to the digest; it was just written, so it is read from the page cache."""
        if len(self._buffer) < min(_DIGEST_PART_BYTES, end - start):
            self._buffer = memoryview(bytearray(min(_DIGEST_PART_BYTES, end - start)))
        # preadv reads at an offset and leaves the file position to the writer, which is in another thread.
        while start < end and (count := os.preadv(self.descriptor, [self._buffer[: end - start]], start)):
            self._sha.update(self._buffer[:count])
            start += count

    def digest(self) -> Digest:
        """Return the digest of everything that was written."""
        for queued in self._queued_digests:
            queued.result()
        self._digest(self._num_queued_bytes, self._size)
        return Digest(self._size, self._sha.hexdigest())

    def close(self) -> None:
        if not self.closed:
            # The digest thread must not read from a closed descriptor: its number may belong to another file by then.
            wait(self._queued_digests)
            os.close(self.descriptor)
        super().close()


def _nearest_existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _entries(folder: Path) -> list[Path]:
    """Return what is in a folder, sorted: file systems list names in any order, and crash tests count operations."""
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        # Another run is removing it at the same time.
        return []


def _is_held_by_nfs(path: Path) -> bool:
    return path.name.startswith(".nfs")


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def json_writer(value: object) -> Writer:
    """Return a writer of one readable JSON document."""
    return bytes_writer((json.dumps(value, indent=1, sort_keys=True) + "\n").encode())


def bytes_writer(content: bytes) -> Writer:
    return methodcaller("write", content)
