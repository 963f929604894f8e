"""JSON files written by people: read strictly, with the line of every value."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from json import JSONDecodeError
from pathlib import Path

from pipeline.errors import InvalidExperiment, Problem
from pipeline.system.formatting import Json

JsonPath = tuple[str | int, ...]
_MAX_BYTES = 1 << 20
# Far below the depth at which Python's own recursion ends, so that what is read can also be printed.
_MAX_DEPTH = 100
# The tokens of valid JSON: a string, a bracket or separator, or else a number or word.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]|[^\s"{}\[\]:,]+')
# The likely cause of a syntax error, by the character at which the decoder stopped.
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
# The standard decoder's messages in plainer words. From Python 3.13 on, a trailing comma has messages of its own.
_PLAIN_WORDS = {
    "Expecting value": "Expected a value",
    "Illegal trailing comma before end of array": "Expected a value",
    "Expecting property name enclosed in double quotes": "Expected a key in double quotes",
    "Illegal trailing comma before end of object": "Expected a key in double quotes",
    "Expecting ':' delimiter": "Expected ':'",
    "Expecting ',' delimiter": "Expected ',' or a closing bracket",
    "Extra data": "Text after the end",
    "Invalid control character at": "A string must end on its line, without tabs (is a closing quote missing?)",
}
# These messages name the cause themselves.
_EXPLAINED = ("A string", "Duplicate", "Expected ':'", "Number", "Nested")


@dataclass(frozen=True)
class Document:
    """A parsed file and, for each value, the offset at which it begins."""

    path: Path
    text: str
    value: Json = None
    offsets: dict[JsonPath, int] = field(default_factory=dict)

    def place(self, path: JsonPath) -> str:
        """Return ``file:line`` of a value, or of the nearest value that encloses it."""
        # Values of --set come without a text.
        if not self.text:
            return str(self.path)
        while path and path not in self.offsets:
            path = path[:-1]
        return f"{self.path}:{_line(self.text, self.offsets.get(path, 0))}"


def parse_json(text: str) -> Json:
    """Parse a text as strictly as a settings file, or raise ValueError."""
    return _parse(Path(), text).value


def read_document(path: Path) -> Document:
    """Read a settings file, or raise InvalidExperiment with line, column and likely cause."""
    # A FIFO or a device would block or never end, so only regular files are opened.
    if not path.is_file():
        actual = "is something else" if path.exists() else "there is none"
        raise InvalidExperiment([Problem(str(path), f"must be a file, but {actual}")])
    num_bytes = path.stat().st_size
    if num_bytes > _MAX_BYTES:
        raise InvalidExperiment([Problem(str(path), f"must be at most {_MAX_BYTES} bytes, but has {num_bytes}")])
    try:
        # Some editors begin a file with a byte order mark, which means nothing in UTF-8.
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"must be UTF-8 text, but byte {error.start} is not"
        raise InvalidExperiment([Problem(str(path), what, "save it as UTF-8")]) from None
    if not text.strip():
        raise InvalidExperiment([Problem(str(path), "must be a JSON object, but the file is empty")])
    try:
        return _parse(path, text)
    except JSONDecodeError as error:
        raise InvalidExperiment([_syntax_problem(path, error)]) from None


def _parse(path: Path, text: str) -> Document:
    try:
        value = json.loads(text)
    except JSONDecodeError:
        raise
    except (RecursionError, ValueError):
        # Nested too deeply, or a number with too many digits. Neither error has a position; _locate raises with one.
        _locate(text)
        raise
    return Document(path, text, value, _locate(text))


def _locate(text: str) -> dict[JsonPath, int]:
    """Return the offset of every value in a text that json.loads accepts.

    json.loads keeps the last of two equal keys and accepts NaN and numbers that become infinite; here they are refused.
    """
    offsets: dict[JsonPath, int] = {}
    # For each open bracket, the key or index of the value that comes next.
    path: list[str | int] = []
    is_key_next = False
    for match in _TOKEN.finditer(text):
        token, offset = match[0], match.start()
        if token in "}]":
            path.pop()
            is_key_next = False
        elif token == ",":
            last = path[-1]
            is_key_next = isinstance(last, str)
            path[-1] = last if isinstance(last, str) else last + 1
        elif is_key_next:
            path[-1] = json.loads(token)
            is_key_next = False
            if tuple(path) in offsets:
                first_line = _line(text, offsets[tuple(path)])
                message = f"Duplicate key {path[-1]!r}, which stands in line {first_line} already"
                raise JSONDecodeError(message, text, offset)
        elif token != ":":
            offsets[tuple(path)] = offset
            is_key_next = token == "{"
            if token in "{[":
                path.append("" if is_key_next else 0)
            if refusal := _token_refusal(token, len(path)):
                raise JSONDecodeError(refusal, text, offset)
    return offsets


def _token_refusal(token: str, depth: int) -> str:
    """Return why a bracket, number or word is refused, or an empty string."""
    if depth > _MAX_DEPTH:
        return f"Nested too deeply: at most {_MAX_DEPTH} brackets may be open"
    if token in ("NaN", "Infinity", "-Infinity"):
        return "Not a JSON value"
    if token[0] not in "-0123456789":
        return ""
    try:
        number = json.loads(token)
    except ValueError:
        return "Number with too many digits"
    is_infinite = isinstance(number, float) and math.isinf(number)
    return "Number out of range" if is_infinite else ""


def _syntax_problem(path: Path, error: JSONDecodeError) -> Problem:
    text = error.doc
    position = error.pos
    if error.msg.startswith("Illegal trailing comma"):
        # Earlier versions of Python stop at the bracket after the comma.
        position = next(match.start() for match in _TOKEN.finditer(text, position + 1))
    # Where a file ends too soon, its last line is more useful than the empty one after it.
    error = JSONDecodeError(_PLAIN_WORDS.get(error.msg, error.msg), text, min(position, len(text.rstrip())))
    line = text.split("\n")[error.lineno - 1].rstrip("\r")
    character = text[error.pos : error.pos + 1].strip()
    is_explained = error.msg.startswith(_EXPLAINED)
    cause = f" ({_CAUSES[character]})" if character in _CAUSES and not is_explained else ""
    # A file on one endless line must not flood the terminal.
    excerpt = f"{line[:200]}\n      {' ' * min(error.colno - 1, 200)}^"
    return Problem(f"{path}:{error.lineno}:{error.colno}", f"{error.msg}{cause}\n      {excerpt}")


def _line(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1
