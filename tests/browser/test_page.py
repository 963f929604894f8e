"""The page in a real browser: what is drawn, what can be done with it, and what it never does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.report.page import page
from tests.support.browser import CHROMIUM, Browser
from tests.support.stories import HOSTILE, series, start, story

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]
CURVES = "[...document.querySelectorAll('.chart')].map((chart) => chart.querySelectorAll('path.curve[d*=L]').length)"
Show = Callable[..., Browser]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Show]:
    """Show stories in the browser; whatever it complains of afterwards is an error."""

    def showing(*stories: dict[str, Any], width: int = 1000, scheme: str = "light") -> Browser:
        path = tmp_path / "page.html"
        path.write_text(page(stories))
        browser.problems.clear()
        browser.requests.clear()
        browser.look(width, scheme=scheme)
        browser.open(path)
        return browser

    yield showing
    assert browser.problems == []
    assert browser.requests == [(tmp_path / "page.html").as_uri()]


def plot(browser: Browser, share: float) -> tuple[float, float]:
    """Return a place inside the first chart, so far across its plot."""
    browser.ask("document.querySelector('.plot').scrollIntoView({block: 'center'})")
    box = browser.ask(
        "(() => { const [chart, box] = [shared.charts[0], document.querySelector('.plot').getBoundingClientRect()];"
        " return [box.left + chart.left, box.left + chart.right, box.top + box.height / 2]; })()"
    )
    return box[0] + share * (box[1] - box[0]), box[2]


def press(browser: Browser, selector: str) -> None:
    browser.ask(f"document.querySelector({selector!r}).click()")
    browser.settle()


def path_of(browser: Browser, colour: int) -> str:
    found: str = browser.ask(f"document.querySelector('.plot > svg path.curve.colour-{colour}').getAttribute('d')")
    return found


def many() -> dict[str, Any]:
    """A story with every kind of chart, skipped steps and two resumes."""
    groups = ("rates", "grad_norms", "loss_weights", "times", "memory")
    curves = {group: {"one": series([1.0, 3.0, 2.0]), "two": series([1.0, 3.0, 2.0])} for group in groups}
    starts = [start(1, "killed"), start(2, "stopped", epoch=1.0), start(3, "finished", epoch=2.0)]
    skipped = {"count": 2, "epochs": [0.5, 2.5]}
    return story(curves={**curves, "steps": {"loss": series([1.0] * 4)}}, starts=starts, skipped=skipped)


def test_every_series_is_drawn(show: Show) -> None:
    """Each register has its splits and steps in one chart, every other group has a chart of its own."""
    browser = show(many())
    assert browser.ask(CURVES.replace("[d*=L]", "[d*=L]:not(.sample *)")) == [3, 2, 2, 2, 2, 2]
    assert browser.ask("document.querySelectorAll('.plot .mark.resumed').length") == 2 * 3
    assert browser.ask("document.querySelectorAll('.plot .mark.skipped').length") == 2 * 2
    assert browser.ask("document.querySelectorAll('.plot .ring').length") == 1


def test_hostile_texts_are_shown_as_texts(show: Show) -> None:
    """Names, errors, settings and lineage appear as they are written, and nothing in them runs."""
    curves = {"val": {HOSTILE: series([1.0, 2.0])}, "rates": {HOSTILE: series([1.0, 2.0])}}
    link = {"of": "tiny", "module": HOSTILE, "experiment": HOSTILE, "pool": HOSTILE, "name": HOSTILE}
    errors = [{"rank": 0, "error": HOSTILE}]
    changes = {"state": "failed", "errors": errors, "settings": {HOSTILE: HOSTILE}, "lineage": [link]}
    browser = show(story(curves=curves, registers=[{"name": HOSTILE}], **changes))
    assert browser.ask("document.title") == "tiny – training report"
    assert browser.ask("document.images.length") == 0
    assert browser.ask("document.querySelector('pre').textContent") == HOSTILE
    assert browser.ask("document.body.innerText").count(HOSTILE) >= 8


def test_gap_splits_the_curve(show: Show) -> None:
    """Where there is no value there is no line, and a value between two gaps is a dot."""
    browser = show(story(curves={"val": {"loss": series([4.0, 3.0, None, 2.0, None, 1.0, 2.0])}}))
    assert path_of(browser, 1).count("M") == 3
    assert browser.ask("document.querySelectorAll('.plot .dot.colour-1').length") == 5


@pytest.mark.parametrize("values", [[5.0], [2.0, 2.0, 2.0], [0.0, 0.0], [None, None], [-3.0, -1.0], [1e-9, 1e9], []])
def test_odd_series_are_drawn_without_odd_numbers(show: Show, values: list[float | None]) -> None:
    """One point, constants, zeros, nothing at all and huge extents give finite places on both axes."""
    browser = show(story(curves={"val": {"loss": series(values)}, "train": {}}, best=None))
    for _ in range(2):
        drawn = browser.ask("[...document.querySelectorAll('.plot')].map((one) => one.outerHTML).join()")
        assert "NaN" not in drawn
        assert "Infinity" not in drawn
        browser.ask("document.querySelector('.scale:enabled')?.click()")


def test_hover_shows_the_values(show: Show) -> None:
    """The nearest epoch is named with the value of every curve there; leaving hides it."""
    browser = show(story())
    browser.move(*plot(browser, 0.65))
    assert browser.ask("document.querySelector('.tip').innerText").split() == ["epoch", "2", "val", "1.5", "train", "2"]
    browser.move(1, 1)
    assert browser.ask("document.querySelector('.tip').hidden") is True


def test_arrow_keys_walk_along_the_epochs(show: Show) -> None:
    """What the mouse can read, the keyboard can."""
    browser = show(story())
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowRight"):
        browser.ask(
            f"document.querySelector('.plot > svg').dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}'}}))"
        )
    assert "epoch 1" in browser.ask("document.querySelector('.tip').innerText")


def test_legend_and_axis_can_be_switched(show: Show) -> None:
    """A curve goes and comes back with its entry; the logarithmic axis moves it."""
    browser = show(story())
    linear = path_of(browser, 1)
    press(browser, ".legend button")
    assert browser.ask("document.querySelectorAll('.plot > svg path.curve').length") == 1
    press(browser, ".legend button")
    press(browser, ".scale")
    assert path_of(browser, 1) != linear
    press(browser, ".scale")
    assert path_of(browser, 1) == linear


def test_drag_zooms_all_charts_and_the_button_undoes_it(show: Show) -> None:
    """The stretch between press and release is shown in every chart."""
    browser = show(many())
    browser.move(*plot(browser, 0.25), "mousePressed", "left")
    browser.move(*plot(browser, 0.75), "mouseMoved", "left")
    browser.move(*plot(browser, 0.75), "mouseReleased", "left")
    ranges = browser.ask("shared.charts.map((chart) => chart.range)")
    assert all(one == pytest.approx([0.75, 2.25], abs=0.05) for one in ranges)
    press(browser, ".out")
    assert browser.ask("shared.charts.map((chart) => chart.range)") == [[0, 3]] * len(ranges)


def test_experiments_have_their_own_colours_and_switches(show: Show) -> None:
    """Three experiments lie over each other, one of them is switched off, and what differs is listed."""
    stories = [story(name, settings={"training.seed": seed}) for seed, name in enumerate("abc")]
    browser = show(*stories)
    strokes = "[...document.querySelectorAll('.plot > svg path.curve')].map((one) => getComputedStyle(one).stroke)"
    assert len(set(browser.ask(strokes))) == 3
    press(browser, ".toolbar .key")
    assert len(set(browser.ask(strokes))) == 2
    assert browser.ask("document.querySelector('tr.differs').innerText").split() == ["training.seed", "0", "1", "2"]


@pytest.mark.parametrize("width", [390, 1000, 1400])
@pytest.mark.parametrize("num_stories", [1, 3])
def test_page_fits_every_screen(show: Show, width: int, num_stories: int) -> None:
    """Nothing is wider than the screen, and every label of an axis lies inside its chart."""
    stories = [{**many(), "name": f"a_group/quite_a_long_name_{number}" * 3} for number in range(num_stories)]
    browser = show(*stories, width=width)
    assert browser.ask("document.documentElement.scrollWidth") <= width
    clipped = (
        "[...document.querySelectorAll('.tick')].filter((tick) => {"
        " const [own, all] = [tick.getBoundingClientRect(), tick.ownerSVGElement.getBoundingClientRect()];"
        " return own.left < all.left - 0.5 || own.right > all.right + 0.5; }).length"
    )
    assert browser.ask(clipped) == 0


def test_page_follows_light_and_dark(show: Show) -> None:
    """The ground is light or dark as the reader's system is, and texts can be read on it."""
    colours = "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    light = show(story(), scheme="light").ask(colours)
    dark = show(story(), scheme="dark").ask(colours)
    assert light == ["rgb(255, 255, 255)", "rgb(27, 31, 36)"]
    assert dark == ["rgb(21, 24, 28)", "rgb(230, 233, 236)"]
