"""JSON files written by people: read strictly, with the place of every value."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from json.decoder import JSONDecodeError, scanstring  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

from pipeline.errors import InvalidExperiment, Problem

JsonPath = tuple[str | int, ...]
_MAX_BYTES = 1 << 20
_SPACE = re.compile(r"[ \t\n\r]*")
_CAUSES = {
    "/": "JSON has no comments",
    "#": "JSON has no comments",
    "'": "strings and keys need double quotes",
    "T": "write true, in lower case",
    "F": "write false, in lower case",
    "N": "write null; NaN is not JSON",
    "I": "Infinity is not JSON",
    "-": "-Infinity is not JSON",
    "}": "a comma before a closing bracket, or a value is missing",
    "]": "a comma before a closing bracket, or a value is missing",
    '"': "the comma before it is missing",
    ".": "numbers begin with a digit: 0.5",
    "+": "numbers have no plus sign",
    "": "the file ends before its brackets are closed",
}
# What the standard decoder says, in the words of an author.
_WORDS = {
    "Expecting value": "Expected a value",
    "Invalid control character at": "A string must end on its line, without tabs (is a closing quote missing?)",
}
_EXPLAINED = ("A string", "Duplicate", "Expected ':'")


@dataclass
class Document:
    """A parsed file and, for each value, the offset at which it stands."""

    path: Path
    text: str
    value: Any = None
    offsets: dict[JsonPath, int] = field(default_factory=dict)

    def place(self, path: JsonPath) -> str:
        """Return ``file:line`` of a value, or of the nearest one that encloses it."""
        while path and path not in self.offsets:
            path = path[:-1]
        if not self.text:
            return str(self.path)
        line = self.text.count("\n", 0, self.offsets.get(path, 0)) + 1
        return f"{self.path}:{line}"


def parse_json(text: str) -> Any:
    """Parse a text as strictly as a settings file, or raise ValueError."""
    document = Document(Path(), text)
    _Scanner(document).scan()
    return document.value


def read_document(path: Path) -> Document:
    """Read a settings file, or raise InvalidExperiment with line, column and likely cause."""
    document = Document(path, _read_text(path))
    try:
        _Scanner(document).scan()
    except JSONDecodeError as error:
        said = JSONDecodeError(_WORDS.get(error.msg, error.msg), error.doc, error.pos)
        raise InvalidExperiment([_syntax_problem(path, said)]) from None
    except RecursionError:
        raise InvalidExperiment([Problem(str(path), "must not be nested so deeply")]) from None
    return document


def _read_text(path: Path) -> str:
    if not path.is_file():
        found = "is something else" if path.exists() else "there is none"
        raise InvalidExperiment([Problem(str(path), f"must be a file, but {found}")])
    if path.stat().st_size > _MAX_BYTES:
        size = path.stat().st_size
        raise InvalidExperiment([Problem(str(path), f"must be at most {_MAX_BYTES} bytes, but has {size}")])
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"must be UTF-8 text, but byte {error.start} is not"
        raise InvalidExperiment([Problem(str(path), what, "save it as UTF-8")]) from None
    if not text.strip():
        raise InvalidExperiment([Problem(str(path), "must be a JSON object, but the file is empty")])
    return text


def _syntax_problem(path: Path, error: JSONDecodeError) -> Problem:
    # Where a file ends too soon, its last line is more useful than the empty one after it.
    position = min(error.pos, len(error.doc.rstrip()))
    error = JSONDecodeError(error.msg, error.doc, position)
    line = error.doc.split("\n")[error.lineno - 1].rstrip("\r")
    found = error.doc[position : position + 1].strip()
    is_explained = error.msg.startswith(_EXPLAINED)
    cause = f" ({_CAUSES[found]})" if found in _CAUSES and not is_explained else ""
    shown = f"{line[:200]}\n      {' ' * min(error.colno - 1, 200)}^"
    return Problem(f"{path}:{error.lineno}:{error.colno}", f"{error.msg}{cause}\n      {shown}")


class _Scanner:
    """A strict reader on top of the standard decoder that also notes where each value stands."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._text = document.text
        self._decoder = json.JSONDecoder(parse_constant=None)

    def scan(self) -> None:
        self._document.value, end = self._value(self._skip(0), ())
        if self._skip(end) != len(self._text):
            raise self._error("Text after the end", self._skip(end))

    def _value(self, at: int, path: JsonPath) -> tuple[Any, int]:
        self._document.offsets[path] = at
        opening = self._text[at : at + 1]
        if opening == "{":
            return self._object(at, path)
        if opening == "[":
            return self._array(at, path)
        if opening in ("N", "I") or self._text.startswith("-I", at):
            raise self._error("Not a JSON value", at)
        try:
            value, end = self._decoder.raw_decode(self._text, at)
        except JSONDecodeError:
            raise
        except ValueError:
            raise self._error("Number with too many digits", at) from None
        if isinstance(value, float) and not math.isfinite(value):
            raise self._error("Number out of range", at)
        return value, end

    def _object(self, at: int, path: JsonPath) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        end = at + 1
        for place in self._items(at, "}"):
            if self._text[place : place + 1] != '"':
                raise self._error("Expected a key in double quotes", place)
            key, end = scanstring(self._text, place + 1, True)
            if key in found:
                known = (*path, key)
                first = self._text.count("\n", 0, self._document.offsets[known]) + 1
                raise self._error(f"Duplicate key {key!r}, which stands in line {first} already", place)
            colon = self._skip(end)
            if self._text[colon : colon + 1] != ":":
                raise self._error("Expected ':'", colon)
            found[key], self._end = self._value(self._skip(colon + 1), (*path, key))
        return found, self._end

    def _array(self, at: int, path: JsonPath) -> tuple[list[Any], int]:
        found: list[Any] = []
        for place in self._items(at, "]"):
            value, self._end = self._value(place, (*path, len(found)))
            found.append(value)
        return found, self._end

    def _items(self, at: int, closing: str) -> Iterator[int]:
        """Yield where each item starts; the consumer leaves the item's end in ``self._end``."""
        place = self._skip(at + 1)
        if self._text[place : place + 1] == closing:
            self._end = place + 1
            return
        while True:
            yield place
            end = self._skip(self._end)
            mark = self._text[end : end + 1]
            if mark == closing:
                self._end = end + 1
                return
            if mark != ",":
                raise self._error(f"Expected ',' or {closing!r}", end)
            place = self._skip(end + 1)

    def _skip(self, at: int) -> int:
        match = _SPACE.match(self._text, at)
        return match.end() if match else at

    def _error(self, message: str, at: int) -> JSONDecodeError:
        return JSONDecodeError(message, self._text, at)
