"""Where weights came from is read from the frozen copy, without running it."""

from __future__ import annotations

from pathlib import Path

from pipeline.paths import ExperimentPaths
from pipeline.report.lineage import trace_lineage

FROM = 'settings = {{"load_weights_from_exp": {{"exp_name": "{}", "ckp_pool_name": "best", "module_name": "head"}}}}\n'


def write(home: Path, name: str, **modules: str) -> ExperimentPaths:
    paths = ExperimentPaths(home, name)
    folder = paths.results / "pymodules/modules"
    folder.mkdir(parents=True)
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)
    return paths


def test_lineage_goes_back_to_the_first_experiment(tmp_path: Path) -> None:
    """Experiments that others were built on are followed, and files are named."""
    write(tmp_path, "first", head='settings = {"load_weights_from_ckp": {"ckp_name": "pretrained"}}\n')
    write(tmp_path, "second", head=FROM.format("first"))
    found = trace_lineage(write(tmp_path, "third", head=FROM.format("second"), other="settings = {}\n"))
    assert [(link["of"], link["experiment"], link["name"]) for link in found] == [
        ("third", "second", "head"),
        ("second", "first", "head"),
        ("first", "", "pretrained"),
    ]


def test_experiments_that_name_each_other_end(tmp_path: Path) -> None:
    """A ring is walked once."""
    write(tmp_path, "one", head=FROM.format("two"))
    assert len(trace_lineage(write(tmp_path, "two", head=FROM.format("one")))) == 2


def test_what_is_not_written_out_is_left_unsaid(tmp_path: Path) -> None:
    """Computed settings, broken files and names that lead elsewhere give no lineage and run nothing."""
    computed = "import os\nos.abort()\nsettings = dict(load_weights_from_exp=1)\n"
    paths = write(tmp_path, "tiny", a=computed, b="settings = {", c="settings: int = 3\n", d=FROM.format("../../etc"))
    assert [link["experiment"] for link in trace_lineage(paths)] == ["../../etc"]
