"""The page: a story as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import pipeline
from pipeline.paths import ExperimentPaths
from pipeline.report.data import collect
from pipeline.report.series import MAX_POINTS
from pipeline.system.files import replace_text
from pipeline.system.formatting import as_json
from pipeline.system.logging import LOGGER

_SCRIPTS = ("scales", "elements", "pointing", "chart", "curves", "tables", "page")


def write_report(target: Path, experiments: Sequence[ExperimentPaths]) -> int:
    """Write one page about all these experiments, whole or not at all, and return its size."""
    text = page([collect(paths, MAX_POINTS // len(experiments)) for paths in experiments])
    replace_text(target, text)
    return len(text.encode())


def leave_report(paths: ExperimentPaths) -> Path | None:
    """Write the page at the end of a run and return where it is; whatever goes wrong is one warning."""
    try:
        paths.report_file.parent.mkdir(parents=True, exist_ok=True)
        write_report(paths.report_file, [paths])
    except Exception as error:
        LOGGER.warning("The report could not be written: %s. The results are complete without it.", error)
        return None
    return paths.report_file


def page(stories: Sequence[dict[str, Any]]) -> str:
    """Return the HTML text that shows these stories."""
    style = _asset("style.css")
    script = "\n".join(_asset(f"{name}.js") for name in _SCRIPTS)
    embedded = {"stories": stories, "written": time.strftime("%Y-%m-%d %H:%M:%S%z"), "version": pipeline.__version__}
    parts = {
        "title": html.escape(", ".join(story["name"] for story in stories)),
        "style_digest": _digest(style),
        "script_digest": _digest(script),
        "style": style,
        "script": script,
        "stories": _embedded(embedded),
    }
    # One pass over the template, so that nothing that is filled in is taken for a place to fill.
    pieces = _asset("page.html").split("%%")
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def _asset(name: str) -> str:
    return (files("pipeline.report") / "assets" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """Return the digest by which the content policy lets this script run, and no other."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _embedded(value: Any) -> str:
    """Return JSON that cannot end the element it stands in, whatever its texts say."""
    return json.dumps(as_json(value), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
