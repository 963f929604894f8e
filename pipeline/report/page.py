"""The page: stories as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

import pipeline
from pipeline.monitoring.experiment_state import ExperimentState, read_experiment_state
from pipeline.paths import ExperimentPaths
from pipeline.report.data import collect
from pipeline.report.series import MAX_POINTS
from pipeline.system.files import replace_text
from pipeline.system.formatting import as_json
from pipeline.system.logging import LOGGER

# In the order in which they use one another.
_SCRIPTS = ("scales", "elements", "pointing", "chart", "curves", "tables", "page")


def write_report(target: Path, experiments: Sequence[ExperimentState]) -> int:
    """Write one page about all these experiments, whole or not at all, and return its size in bytes."""
    text = page([collect(experiment, MAX_POINTS // len(experiments)) for experiment in experiments])
    replace_text(target, text)
    return len(text.encode())


def leave_report(paths: ExperimentPaths) -> Path | None:
    """Write the page at the end of a run and return where it is; any failure is one warning."""
    try:
        paths.report_file.parent.mkdir(parents=True, exist_ok=True)
        write_report(paths.report_file, [read_experiment_state(paths)])
    except Exception as error:
        # The run has ended well or badly by itself; a page must not change its exit code.
        LOGGER.warning("The report could not be written: %s. The results are complete without it.", error)
        return None
    return paths.report_file


def page(stories: Sequence[Mapping[str, object]]) -> str:
    """Return the HTML text that shows these stories."""
    style = _read_asset("style.css")
    script = "\n".join(_read_asset(f"{name}.js") for name in _SCRIPTS)
    embedded = {"stories": stories, "written": time.strftime("%Y-%m-%d %H:%M:%S%z"), "version": pipeline.__version__}
    content = json.dumps(as_json(embedded), allow_nan=False, separators=(",", ":"))
    parts = {
        "title": html.escape(", ".join(str(story["name"]) for story in stories)),
        "style_digest": _digest(style),
        "script_digest": _digest(script),
        "style": style,
        "script": script,
        # Without "<", no text can end the script element that the JSON is in.
        "stories": content.replace("<", "\\u003c"),
    }
    # One pass over the template, so that nothing that is filled in is taken for a place to fill.
    pieces = _read_asset("page.html").split("%%")
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def _read_asset(name: str) -> str:
    return (files("pipeline.report") / "assets" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """Return the digest by which the content security policy lets this script or style run, and no other."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
