"""The verb `report`."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.__main__ import main
from tests.support.experiments import tree, write_experiment
from tests.support.running import run_inside


def call(home: Path, *words: str) -> int:
    return main(["report", *words, "--data-home", str(home)])


def test_report_of_one_experiment_lies_among_its_logs(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Path and size are told, the results stay as they are, and an older page is replaced as a whole."""
    run_inside(home, "--stop-after-epoch", "0")
    page = home / "experiment_logs/tiny/report.html"
    page.write_text("old")
    before = tree(home / "experiment_results")
    capsys.readouterr()
    assert call(home, "tiny") == 0
    assert capsys.readouterr().out.startswith(f"report: {page} (")
    assert page.read_text().endswith("</html>\n")
    assert tree(home / "experiment_results") == before
    assert [path for path in page.parent.iterdir() if path.name.startswith(".")] == []


def test_report_of_several_experiments_lies_here(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each is told once, in the order asked for, in one file of the current folder."""
    write_experiment(home, "other", training={"seed": 4})
    for name in ("tiny", "other"):
        run_inside(home, "--stop-after-epoch", "0", name=name)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert call(home, "other", "tiny", "other") == 0
    assert "<title>other, tiny – training report</title>" in (here / "report.html").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("tinny",), "Did you mean 'tiny'?"),
        (("../tiny",), "The experiment name must be"),
        (("tiny", "--out", "."), "--out must be a file"),
        (("tiny", "--out", "missing/page.html"), "--out must be in a folder that exists"),
    ],
)
def test_bad_input_is_told(home: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str) -> None:
    """Bad input ends with exit code 2 and a sentence; nothing is written."""
    run_inside(home, "--stop-after-epoch", "0")
    before = tree(home)
    assert call(home, *words) == 2
    assert said in capsys.readouterr().err
    assert tree(home) == before


def test_damaged_record_is_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that does not hold what it should is told in one sentence; no page is written."""
    run_inside(home, "--stop-after-epoch", "0")
    (file,) = (home / "experiment_results/tiny/generations").rglob("loss_weights_0.json")
    file.write_text("[]")
    (home / "experiment_logs/tiny/report.html").unlink()
    assert call(home, "tiny") == 1
    assert f"{file} must hold the loss weights" in capsys.readouterr().err
    assert not (home / "experiment_logs/tiny/report.html").exists()


def test_report_without_results_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An experiment that never ran has nothing to tell."""
    assert call(home, "tiny") == 2
    assert "No results of 'tiny'" in capsys.readouterr().err
