"""Reading pages of the documentation: their sections, tables, snippets and shell commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_WORDS_BEFORE_COMMANDS = {"until", "do", "while", "if", "then", "!"}
_SNIPPET = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Snippet(NamedTuple):
    """A block of code, its language, and the file it belongs to if the page says so."""

    language: str
    text: str
    file: str


class Section(NamedTuple):
    """A heading and the lines below it, up to the next heading."""

    heading: str
    body: str

    def snippets(self, language: str) -> list[str]:
        return [match[2] for match in _SNIPPET.finditer(self.body) if match[1] == language]

    def rows(self) -> list[list[str]]:
        """Return the cells of every table row whose first cell is code."""
        return [_cells(line) for line in self.body.splitlines() if line.startswith("| `")]


def sections(page: Path) -> list[Section]:
    """Split a page at its headings; lines inside snippets are not headings."""
    parts: list[tuple[str, list[str]]] = [("", [])]
    is_code = False
    for line in page.read_text().splitlines(keepends=True):
        is_code ^= line.startswith("```")
        if line.startswith("#") and not is_code:
            parts.append((line.lstrip("#").strip(), []))
        else:
            parts[-1][1].append(line)
    return [Section(heading, "".join(lines)) for heading, lines in parts]


def section(page: Path, heading: str) -> Section:
    return next(part for part in sections(page) if part.heading == heading)


def table_rows(page: Path) -> Iterator[dict[str, str]]:
    """Yield every row of every table of a page, its cells by the headings of their columns."""
    headings: list[str] = []
    for line in page.read_text().splitlines():
        if not line.startswith("|"):
            headings = []
        elif not headings:
            headings = _cells(line)
        elif not line.startswith("|---"):
            yield dict(zip(headings, _cells(line), strict=False))


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split(" | ")]


def snippets(page: Path) -> Iterator[Snippet]:
    """Yield all snippets of a page in order."""
    text = page.read_text()
    for match in _SNIPPET.finditer(text):
        yield Snippet(match[1], match[2], _file_of(match[2], text[: match.start()]))


def _file_of(snippet: str, text_before: str) -> str:
    """Return the path in a snippet's first line, or else the one that ends the sentence right before it."""
    in_snippet = re.match(r"# (\S+\.py)\n", snippet)
    in_sentence = re.search(r"`(\S+\.json)`:\n+$", text_before)
    return in_snippet[1] if in_snippet else in_sentence[1] if in_sentence else ""


def commands(script: str) -> Iterator[list[str]]:
    """Yield the words of every simple command of a shell script, without assignments and redirections."""
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set(";&|<>"):
                if words:
                    yield words
                # What follows a redirection is a file, not a command.
                words = ["redirected"] if set(word) <= set("<>") else []
            elif words or not (word in _WORDS_BEFORE_COMMANDS or re.fullmatch(r"\w+=.*", word)):
                words.append(word)
