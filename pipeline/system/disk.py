"""The one layer through which everything that must survive is written."""

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
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pipeline.errors import PipelineError
from pipeline.system.formatting import shown_bytes

Result = TypeVar("Result")
Writer = Callable[[BinaryIO], None]
_CHUNK = 1 << 20
# What is worth handing to a second thread and to the disk, and how much is written at once.
_LARGE = 4 << 20
_PORTION = 8 << 20
_ATTEMPTS_TO_EMPTY = 5
_BEGIN_STORING = 2
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_SECONDS_BETWEEN_ATTEMPTS = 0.001


# How much less important a thread of the background is than the training, and the least that the kernel knows.
_STEPS_BACK = 10
_LEAST = 19


def low_priority_executor(name: str) -> ThreadPoolExecutor:
    """Return a thread for work behind the training, which gives way to it where there are not enough cores."""
    return ThreadPoolExecutor(1, thread_name_prefix=name, initializer=_give_way)


def _give_way() -> None:
    # Elsewhere a thread has no priority of its own. Where it may not be changed, the work is done all the same.
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            own = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, own, min(_LEAST, os.getpriority(os.PRIO_PROCESS, own) + _STEPS_BACK))


@dataclass(frozen=True)
class Digest:
    """What a file must contain."""

    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Digest:
        with path.open("rb") as file:
            return cls.of_file(file)

    @classmethod
    def of_file(cls, file: BinaryIO) -> Digest:
        """Return the digest of what is left to read of an open file."""
        sha = hashlib.sha256()
        size = 0
        while chunk := file.read(_CHUNK):
            sha.update(chunk)
            size += len(chunk)
        return cls(size, sha.hexdigest())


class Disk:
    """Changes of the file system, each durable once the call that says so returns.

    A failed fsync is never tried again: the kernel may have dropped the data it failed to write.
    """

    num_needed_bytes = 0

    def perform(self, operation: str, path: Path, action: Callable[[], Result]) -> Result:
        """Do one change; every change passes here, so that a test can put a fault in its way."""
        while True:
            try:
                return action()
            except (InterruptedError, BlockingIOError):
                # Nothing has happened: a signal came, or the file system was busy.
                time.sleep(_SECONDS_BETWEEN_ATTEMPTS)
            except OSError as error:
                raise PipelineError(
                    f"Could not {operation} {path}: {error.strerror or error}{self._room(error, path)}. "
                    "The last commit is intact.\n"
                    "  fix: free space or restore access, then run again with --auto."
                ) from error

    def _room(self, error: OSError, path: Path) -> str:
        if error.errno not in _NO_SPACE:
            return ""
        if self.free_inodes(path) == 0:
            return " (no inodes are free: the file system cannot hold more files, however small)"
        needed = f"{shown_bytes(self.num_needed_bytes)} needed, " if self.num_needed_bytes else ""
        return f" ({needed}{shown_bytes(self.free_bytes(path))} free)"

    def free_bytes(self, path: Path) -> int:
        """Return how much may still be written where ``path`` is or will be."""
        return shutil.disk_usage(_nearest_existing(path)).free

    def free_inodes(self, path: Path) -> int | None:
        """Return how many files may still be created there; None where the file system does not count them."""
        found = os.statvfs(_nearest_existing(path))
        return found.f_favail if found.f_files else None

    def check_room(self, path: Path, num_bytes: int) -> None:
        """Refuse to begin what cannot fit."""
        self.num_needed_bytes = num_bytes
        free = self.free_bytes(path)
        if num_bytes > free:
            raise PipelineError(
                f"The next commit needs {shown_bytes(num_bytes)} in {path}, but {shown_bytes(free)} are free. "
                "The last commit is intact.\n  fix: free space, then run again with --auto."
            )

    def write(self, path: Path, writer: Writer) -> Digest:
        """Write a new file and make its content durable (its name is so once its folder is synced)."""
        raw = self.perform("create", path, lambda: _RawFile(self, path))
        with io.BufferedWriter(raw, _CHUNK) as file:
            writer(file)
            file.flush()
            self.perform("sync", path, lambda: os.fsync(raw.descriptor))
            return raw.digest()

    def write_some(self, descriptor: int, content: memoryview) -> int:
        """Write as much as the kernel takes and return how much that was."""
        return os.write(descriptor, content)

    def replace_file(self, path: Path, writer: Writer, staging: Path) -> Digest:
        """Replace a file in one atomic, durable step; ``staging`` is on the same file system."""
        if staging.exists():
            self.remove(staging)
        digest = self.write(staging, writer)
        self.rename(staging, path)
        self.sync_folder(path.parent)
        return digest

    def make_folder(self, path: Path) -> None:
        """Create a folder, and those above it that are missing, each durable in its parent."""
        if path.is_dir():
            return
        self.make_folder(path.parent)
        self.perform("create folder", path, lambda: path.mkdir(exist_ok=True))
        self.sync_folder(path.parent)

    def make_scratch_folder(self, path: Path, top: Path) -> None:
        """Create a folder below ``top``, which must be there; its name need not survive a power cut."""
        if path == top or path.is_dir():
            return
        self.make_scratch_folder(path.parent, top)
        self.perform("create folder", path, lambda: path.mkdir(exist_ok=True))

    def rename(self, source: Path, target: Path) -> None:
        self.perform("rename to", target, lambda: os.replace(source, target))

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name, or a copy where the file system has no hard links."""
        self.perform("link", target, lambda: _link_or_copy(source, target))

    def remove(self, path: Path) -> None:
        self.perform("remove", path, lambda: path.unlink(missing_ok=True))

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder; one that another run has just removed is gone as well."""

        def remove() -> None:
            with contextlib.suppress(FileNotFoundError):
                path.rmdir()

        self.perform("remove folder", path, remove)

    def remove_empty_folders(self, folder: Path, top: Path) -> None:
        """Remove a folder and those above it, below ``top``, as far as they are empty."""
        while folder != top and folder.is_dir() and not any(folder.iterdir()):
            self.remove_folder(folder)
            folder = folder.parent

    def remove_all_empty_folders(self, top: Path) -> None:
        """Remove every folder below ``top`` that holds no file, however deep."""
        for path in sorted(top.rglob("*"), reverse=True):
            if path.is_dir():
                self.remove_empty_folders(path, top)

    def remove_tree(self, path: Path) -> bool:
        """Remove a folder and all in it, without ever following a link; return whether nothing is left.

        On NFS, a file that a process on this machine has open becomes ``.nfs…`` when it is removed, and cannot be
        removed before it is closed. Such files, and the folders that hold them, are left.
        """
        if path.is_symlink() or not path.is_dir():
            self.remove(path)
            return True
        # A run that is being refused at this moment may still add a file of its own.
        for _ in range(_ATTEMPTS_TO_EMPTY):
            found = [self.remove_tree(entry) for entry in _entries(path) if not _is_held_by_nfs(entry)]
            left = _entries(path)
            if not all(found) or any(map(_is_held_by_nfs, left)):
                return False
            if not left:
                break
        self.remove_folder(path)
        return True

    def sync_file(self, path: Path) -> None:
        self.perform("sync", path, lambda: _sync(path, os.O_RDWR))

    def sync_folder(self, path: Path) -> None:
        self.perform("sync folder", path, lambda: _sync(path, os.O_RDONLY | os.O_DIRECTORY))

    def sync_folders(self, top: Path) -> None:
        """Make the names in a whole tree of folders durable, deepest first."""
        for path, _, _ in os.walk(top, topdown=False):
            self.sync_folder(Path(path))


class _RawFile(io.RawIOBase):
    """An unbuffered file that reports each write to its disk and digests what it has written, behind the writer."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self._path = path
        self._sha = hashlib.sha256()
        self._size = 0
        self._num_queued = 0
        self._digesting = list[Future[None]]()
        self._buffer = memoryview(b"")
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Write as much as the kernel takes at once; the buffer above comes back with the rest."""
        content = memoryview(data).cast("B")[:_PORTION]
        count = self._disk.perform("write", self._path, partial(self._disk.write_some, self.descriptor, content))
        self._size += count
        if self._size - self._num_queued >= _LARGE:
            _begin_storing(self.descriptor, self._num_queued, self._size - self._num_queued)
            self._digesting.append(_DIGESTING.submit(self._digest, self._num_queued, self._size))
            self._num_queued = self._size
        return count

    def _digest(self, start: int, end: int) -> None:
        """Take a range of the file into the digest; it comes from the kernel's memory, not from the disk.

        In large parts: between two of them this thread needs the interpreter, which the training then has to wait for.
        """
        if len(self._buffer) < min(_LARGE, end - start):
            self._buffer = memoryview(bytearray(min(_LARGE, end - start)))
        while start < end and (count := os.preadv(self.descriptor, [self._buffer[: end - start]], start)):
            self._sha.update(self._buffer[:count])
            start += count

    def digest(self) -> Digest:
        """Return the digest of all that was written."""
        for digesting in self._digesting:
            digesting.result()
        self._digest(self._num_queued, self._size)
        return Digest(self._size, self._sha.hexdigest())

    def close(self) -> None:
        if not self.closed:
            # A descriptor must not be read after it was closed: it may belong to another file by then.
            wait(self._digesting)
            os.close(self.descriptor)
        super().close()


def _begin_storing(descriptor: int, offset: int, count: int) -> None:
    """Ask the kernel to start writing a range to the disk; without the call the final fsync does all the work."""
    if _SYNC_FILE_RANGE is not None:
        _SYNC_FILE_RANGE(descriptor, ctypes.c_int64(offset), ctypes.c_int64(count), _BEGIN_STORING)


_DIGESTING = low_priority_executor("digest")
_SYNC_FILE_RANGE = getattr(ctypes.CDLL(None), "sync_file_range", None)


def _nearest_existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _entries(folder: Path) -> list[Path]:
    """Return what is in a folder, which another run may be removing at the same time."""
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []


def _is_held_by_nfs(path: Path) -> bool:
    return path.name.startswith(".nfs")


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:
        shutil.copyfile(source, target)


def json_writer(value: Any) -> Writer:
    """Return a writer of one readable JSON document."""
    content = (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
    return bytes_writer(content)


def bytes_writer(content: bytes) -> Writer:
    def write(file: BinaryIO) -> None:
        file.write(content)

    return write
