"""The page is one file that shows texts as texts and asks the network for nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pipeline.paths import ExperimentPaths
from pipeline.report.page import leave_report, page
from tests.support.running import run_inside
from tests.support.stories import HOSTILE, series, story


class Elements(HTMLParser):
    """Collects what a browser would see: elements with their attributes, and the text of each script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts.append(data)


def embedded(text: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(Elements(text).scripts[0])["stories"]
    return found


def hostile_story() -> dict[str, Any]:
    curves = {"val": {HOSTILE: series([1.0, None, 2.0])}, "rates": {HOSTILE: series([1.0])}}
    errors = [{"rank": 0, "error": f"{HOSTILE}<!--<script>%%stories%%"}]
    return story(curves=curves, state="failed", errors=errors, settings={HOSTILE: [HOSTILE, "\u2028\ud800"]})


def test_hostile_texts_stay_texts() -> None:
    """No name, error or setting can end the script it is embedded in, and all of them arrive unchanged."""
    text = page([hostile_story()])
    assert [tag for tag, _ in Elements(text).tags if tag in ("img", "script")] == ["script", "script"]
    assert embedded(text) == [hostile_story()]


def test_numbers_that_json_lacks_are_null() -> None:
    """NaN and infinity of any file that others may write become null."""
    (found,) = embedded(page([story(settings={"a": math.nan, "b": [math.inf, 1.0]})]))
    assert found["settings"] == {"a": None, "b": [None, 1.0]}


def test_page_loads_nothing() -> None:
    """There is no link to anything outside, and the browser is told to refuse one."""
    found = Elements(page([story()]))
    links = [value for _, attributes in found.tags for name, value in attributes.items() if name in ("src", "href")]
    assert links == ["data:,"]
    (policy,) = [attributes["content"] for _, attributes in found.tags if "http-equiv" in attributes]
    assert str(policy).startswith("default-src 'none';")


def test_only_our_script_and_style_are_allowed() -> None:
    """The policy names the digests of the very texts on the page."""
    text = page([story()])
    for tag, position in (("style", 0), ("script", -1)):
        content = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[position]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in text


def test_report_that_cannot_be_written_is_one_warning(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run ends as it would have, and does not name a page that is not there."""
    (home / "experiment_logs/tiny/report.html").mkdir(parents=True)
    assert run_inside(home, "--stop-after-epoch", "0").epoch == 1
    text = capsys.readouterr().out
    assert text.count("The report could not be written") == 1
    assert "report:" not in text
    assert sorted(os.listdir(home / "experiment_logs/tiny")) == ["journal.jsonl", "report.html", "train.log"]


def test_whatever_goes_wrong_is_a_warning(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the report itself never fails a run either."""

    def fails(*arguments: object) -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr("pipeline.report.page.collect", fails)
    assert leave_report(ExperimentPaths(home, "tiny")) is None
