"""A disk that remembers every write and flush, so that its power can be cut at any instant afterwards.

A loop device over a file of this small FUSE file system carries a real ext4 or xfs. ``python -m
tests.support.logged_disk MOUNT IMAGE LOG`` serves two files: ``disk``, the image, whose writes and flushes are logged,
and ``mark``, whose writes become marks in the same log. It speaks the kernel's protocol itself: nothing has to be
installed, but it needs the rights of root.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import BinaryIO

WRITE, FLUSH, MARK = range(3)
_RECORD = struct.Struct("<BQI")
_SECTOR = 512
_ROOT, _DISK, _MARKS = 1, 2, 3
_NAMES = {b"disk": _DISK, b"mark": _MARKS}
# Operations of the protocol, as the kernel numbers them.
_LOOKUP, _FORGET, _GETATTR, _SETATTR, _OPEN, _READ, _WRITE = 1, 2, 3, 4, 14, 15, 16
_STATFS, _RELEASE, _FSYNC, _FLUSH_FILE, _INIT, _ACCESS, _DESTROY, _BATCH_FORGET = 17, 18, 20, 25, 26, 34, 38, 42
_MAX_WRITE = 128 << 10
_BIG_WRITES = 1 << 5


class Server:
    """Answers the kernel, one request after the other."""

    def __init__(self, mount: Path, image: Path, log: Path) -> None:
        self._image = os.open(image, os.O_RDWR)
        self._size = os.fstat(self._image).st_size
        self._log = log.open("wb")
        self._device = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0"
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"logged_disk", bytes(mount), b"fuse", 0, options.encode()):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def serve(self) -> None:
        while True:
            try:
                request = os.read(self._device, _MAX_WRITE + 4096)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                raise
            _, operation, unique, node = struct.unpack_from("<IIQQ", request)
            if operation in (_FORGET, _BATCH_FORGET):
                continue
            answer = self._answer(operation, node, request[40:])
            failure, content = (answer, b"") if isinstance(answer, int) else (0, answer)
            os.write(self._device, struct.pack("<IiQ", 16 + len(content), -failure, unique) + content)
            if operation == _DESTROY:
                return

    def _answer(self, operation: int, node: int, body: bytes) -> bytes | int:
        """Return what the kernel asked for, or an error number."""
        if operation == _INIT:
            return struct.pack("<IIIIHHIIHHI28x", 7, 31, 0, _BIG_WRITES, 16, 12, _MAX_WRITE, 1, 0, 0, 0)
        if operation == _LOOKUP:
            found = _NAMES.get(body.rstrip(b"\0"))
            return struct.pack("<QQQQII", found, 0, 1, 1, 0, 0) + self._attributes(found) if found else errno.ENOENT
        if operation in (_GETATTR, _SETATTR):
            return struct.pack("<QII", 1, 0, 0) + self._attributes(node)
        if operation == _OPEN:
            return struct.pack("<QII", node, 0, 0)
        if operation == _READ:
            _, offset, size = struct.unpack_from("<QQI", body)
            return os.pread(self._image, size, offset) if node == _DISK else b""
        if operation == _WRITE:
            _, offset, size = struct.unpack_from("<QQI", body)
            self._write(node, offset, body[40 : 40 + size])
            return struct.pack("<II", size, 0)
        if operation == _FSYNC and node == _DISK:
            self._record(FLUSH, 0, b"")
        if operation == _STATFS:
            return struct.pack("<QQQQQIIII24x", 0, 0, 0, 0, 0, 4096, 255, 4096, 0)
        return b"" if operation in (_FSYNC, _FLUSH_FILE, _RELEASE, _ACCESS, _DESTROY) else errno.ENOSYS

    def _attributes(self, node: int) -> bytes:
        is_root, size = node == _ROOT, self._size if node == _DISK else 0
        mode = 0o40755 if is_root else 0o100644
        return struct.pack("<QQQQQQIIIIIIIIII", node, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)

    def _write(self, node: int, offset: int, content: bytes) -> None:
        if node == _DISK:
            os.pwrite(self._image, content, offset)
        self._record(WRITE if node == _DISK else MARK, offset, content)

    def _record(self, kind: int, offset: int, content: bytes) -> None:
        self._log.write(_RECORD.pack(kind, offset, len(content)) + content)
        self._log.flush()


@dataclass(frozen=True)
class Event:
    kind: int
    offset: int
    content: bytes


class LoggedDisk:
    """A file system of a kind on a logged disk, and what its disk held at any instant since it was made."""

    def __init__(self, folder: Path, kind: str, num_bytes: int) -> None:
        self._folder, self._log = folder, folder / "log"
        self.image, self._served, self.mounted = folder / "image", folder / "served", folder / "mounted"
        for path in (self._served, self.mounted):
            path.mkdir(parents=True)
        with self.image.open("wb") as file:
            file.truncate(num_bytes)
        subprocess.run([f"mkfs.{kind}", "-q", self.image], check=True)
        subprocess.run(["cp", "--sparse=always", self.image, folder / "empty"], check=True)

    @property
    def mark_file(self) -> Path:
        return self._served / "mark"

    @contextmanager
    def running(self) -> Iterator[Path]:
        """Mount the file system over the logged disk, and yield where."""
        paths = map(str, (self._served, self.image, self._log))
        line = [sys.executable, "-m", "tests.support.logged_disk", *paths]
        with subprocess.Popen(line) as server:
            try:
                while not (self._served / "disk").exists():
                    assert server.poll() is None, "the logged disk could not be mounted"
                    time.sleep(0.02)
                with mounted(self._served / "disk", self.mounted):
                    yield self.mounted
            finally:
                subprocess.run(["umount", self._served], check=False)
                server.wait(30)

    def events(self) -> list[Event]:
        """Return all that happened to the disk, in order."""
        with self._log.open("rb") as file:
            return list(_read_events(file))

    def cut(self, events: list[Event], instant: int, draw: Random, target: Path) -> int:
        """Write what the disk holds if power fails before an event; return the last mark that was made by then.

        What was flushed is there. Of what was not, any writes may be missing, and one of them may be torn.
        """
        subprocess.run(["cp", "--sparse=always", self._folder / "empty", target], check=True)
        flushed = max((index for index in range(instant) if events[index].kind == FLUSH), default=0)
        share = draw.choice((0.0, 0.5, 1.0))
        with target.open("r+b") as file:
            for index, event in enumerate(events[:instant]):
                if event.kind == WRITE and (index < flushed or draw.random() < share):
                    is_torn = index >= flushed and draw.random() < 0.1
                    file.seek(event.offset)
                    file.write(
                        event.content[: len(event.content) // 2 // _SECTOR * _SECTOR] if is_torn else event.content
                    )
        marks = [int(event.content) for event in events[:instant] if event.kind == MARK]
        return max(marks, default=0)


def _read_events(file: BinaryIO) -> Iterator[Event]:
    while header := file.read(_RECORD.size):
        kind, offset, length = _RECORD.unpack(header)
        yield Event(kind, offset, file.read(length))


@contextmanager
def mounted(image: Path, target: Path) -> Iterator[Path]:
    """Mount an image, which replays its journal."""
    subprocess.run(["mount", "-o", "loop", image, target], check=True)
    try:
        yield target
    finally:
        subprocess.run(["umount", target], check=True)


if __name__ == "__main__":
    Server(*map(Path, sys.argv[1:])).serve()
