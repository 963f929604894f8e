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
        return [found[2] for found in _SNIPPET.finditer(self.body) if found[1] == language]

    def rows(self) -> list[list[str]]:
        """Return the cells of every table row whose first cell is code."""
        rows = [line.strip("|").split(" | ") for line in self.body.splitlines() if line.startswith("| `")]
        return [[cell.strip() for cell in row] for row in rows]


def sections(page: Path) -> list[Section]:
    """Split a page at its headings; lines inside snippets are no headings."""
    found: list[tuple[str, list[str]]] = [("", [])]
    is_code = False
    for line in page.read_text().splitlines(keepends=True):
        is_code ^= line.startswith("```")
        if line.startswith("#") and not is_code:
            found.append((line.lstrip("#").strip(), []))
        else:
            found[-1][1].append(line)
    return [Section(heading, "".join(lines)) for heading, lines in found]


def section(page: Path, heading: str) -> Section:
    return next(one for one in sections(page) if one.heading == heading)


def snippets(page: Path) -> Iterator[Snippet]:
    """Yield all snippets of a page in order."""
    text = page.read_text()
    for found in _SNIPPET.finditer(text):
        yield Snippet(found[1], found[2], _file_of(found[2], text[: found.start()]))


def _file_of(snippet: str, before: str) -> str:
    """Return the path in a snippet's first line, or else the one that ends the sentence right before it."""
    own = re.match(r"# (\S+\.py)\n", snippet)
    told = re.search(r"`(\S+\.json)`:\n+$", before)
    return own[1] if own else told[1] if told else ""


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
