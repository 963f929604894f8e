"""The records in the files of offline W&B runs, which W&B itself reads only to send them to a server."""

from __future__ import annotations

from collections.abc import Iterator

_BLOCK = 1 << 15
_FILE_HEADER = 7
_HEADER = 7
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a log of blocks, in which a record may be cut into pieces; a torn end is left out."""
    place, pieces = _FILE_HEADER, list[bytes]()
    while place + _HEADER <= len(content):
        if (left := _BLOCK - place % _BLOCK) < _HEADER:
            place += left
            continue
        end = place + _HEADER + int.from_bytes(content[place + 4 : place + 6], "little")
        kind = content[place + 6]
        if kind not in (_WHOLE, _FIRST, _MIDDLE, _LAST) or end > len(content):
            return
        pieces.append(content[place + _HEADER : end])
        place = end
        if kind in (_WHOLE, _LAST):
            yield b"".join(pieces)
            pieces = []
