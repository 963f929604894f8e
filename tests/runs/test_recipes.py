"""The recipes and the tutorial do what they say: every snippet of a page is run, in order, in an empty data home."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.markdown import DOCS, ROOT, Snippet, snippets
from tests.support.running import environment

PAGES = sorted(
    [
        *(DOCS / "how_to/recipes").glob("*.md"),
        *(DOCS / "tutorial").glob("*.md"),
        DOCS / "how_to/measure_and_average.md",
    ]
)


def run_script(script: str, home: Path) -> str:
    """Run a shell snippet as a reader would, but stop at the first command that fails; return what it printed."""
    search = os.pathsep.join([os.fspath(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {"GORIDEEPSTYLE_DATA_HOME": str(home), "PATH": search, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script],
        cwd=home,
        env=environment(variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{script}\nended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def write(snippet: Snippet, home: Path) -> None:
    assert snippet.file, f"the page must say which file this is:\n{snippet.text}"
    path = home / snippet.file
    assert path.parent.is_dir(), f"{snippet.file} must be in a folder that the page has made"
    path.write_text(snippet.text)


def pattern(line: str) -> str:
    """Return what a shown line stands for: numbers may be others, and … is anything."""
    words = [re.escape(word) for word in line.split()]
    loose = [re.sub(r"\d[\d.,:]*", r"[\\d.,:]+", word.replace(r"\.", ".")).replace("…", ".*") for word in words]
    return r"\s+".join(loose)


def check_shown(shown: str, printed: str) -> None:
    """Find every line of a shown output among those that the snippet before it has printed."""
    for line in shown.splitlines():
        assert re.search(rf"^\s*{pattern(line)}\s*$", printed, re.MULTILINE), f"{line}\nis not in\n{printed}"


def follow(page: Path, home: Path) -> None:
    printed = ""
    for snippet in snippets(page):
        if snippet.language == "bash":
            printed = run_script(snippet.text, home)
        elif snippet.language == "text":
            check_shown(snippet.text, printed)
        elif snippet.language != "sh":
            write(snippet, home)


@pytest.mark.timeout(900)
@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_recipe_works_as_written(page: Path, launching_home: Path) -> None:
    """Whoever follows a page word by word gets to its end and sees what it shows."""
    follow(page, launching_home)


def test_shown_output_may_differ_in_numbers_only() -> None:
    """A page that shows what is not printed is wrong, whatever the numbers of this machine are."""
    check_shown(
        "loss 0.25  over 360 items\nwrote …/a.npz (5.0 kB)", "wrote /tmp/a.npz (7 kB)\n  loss  1.5 over 8 items\n"
    )
    for shown in ("loss 0.25 over 360 points", "loss 0.25", "over 360 items"):
        with pytest.raises(AssertionError):
            check_shown(shown, "loss 1.5 over 8 items\n")
