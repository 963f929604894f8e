"""Snippets of the documentation run: pymodules train and resume, results are read as the pages say."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from pipeline import __main__ as helper
from pipeline.experiment.pymodules.assumptions import SINGLES
from pipeline.experiment.pymodules.loader import FAMILIES
from pipeline.lifecycle.mode import inspect_results
from pipeline.paths import ExperimentPaths
from pipeline.progress import TRAINING, Progress
from pipeline.store.compare import first_difference
from pipeline.system.disk import Disk
from tests.support.markdown import DOCS, section, sections
from tests.support.running import run_inside, run_process

PYMODULES = DOCS / "reference/pymodules"
RESULTS = DOCS / "reference/results.md"
SHARDING = DOCS / "how_to/sharding.md"
COMMIT_OFTEN = "training.checkpoint_every_steps=2"


class Variant(NamedTuple):
    """The files that one section of a page shows together."""

    page: str
    heading: str
    files: dict[str, str]


def variants() -> list[Variant]:
    found = []
    for page in sorted(PYMODULES.glob("*.md")):
        for one in sections(page):
            files = {snippet.split("\n")[0].removeprefix("# "): snippet for snippet in one.snippets("python")}
            if files:
                found.append(Variant(page.stem, one.heading, files))
    return found


@pytest.fixture(scope="module")
def digits_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data home in which a small version of the example has trained for an epoch."""
    home = tmp_path_factory.mktemp("docs")
    assert helper.main(["new", "digits", "--data-home", str(home)]) == 0
    images = home / "experiment_settings/digits/pymodules/utils/images.py"
    small = re.sub(r'(arrays\["\w+"\])', r"\1[:250]", images.read_text())
    assert small.count("[:250]") == 2
    images.write_text(small)
    weights = {"model.classifier.weight": torch.ones(10, 64), "model.classifier.bias": torch.zeros(10)}
    (home / "module_ckps").mkdir()
    torch.save(weights, home / "module_ckps/pretrained.pt")
    done = run_process(home, "--stop-after-epoch", "1", name="digits")
    assert done.returncode == 0, done.stderr
    words = ["digits:best:backbone", "digits:frzn:edges", "--out", str(home / "module_ckps/parts.pt")]
    assert helper.main(["export", *words, "--data-home", str(home)]) == 0
    return home


class EndsInsideAnEpoch(Disk):
    """Lets a run end right after the commit of step 2 of epoch 2."""

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        if target == target.parents[2] / "experiment_results/parts/state.json":
            progress = json.loads(target.read_text())["progress"]
            if (progress["epoch"], progress["step"]) == (2, 2):
                raise KeyboardInterrupt


@pytest.mark.parametrize("variant", variants(), ids=lambda variant: f"{variant.page}: {variant.heading}")
def test_pymodule_snippets_run_and_resume(variant: Variant, digits_home: Path, tmp_path: Path) -> None:
    """Put into the example, the files of a section train, and train to the same bits when interrupted and resumed."""
    home = shutil.copytree(digits_home, tmp_path / "home")
    for name in ("whole", "parts"):
        folder = shutil.copytree(home / "experiment_settings/digits", home / "experiment_settings" / name)
        for path, text in variant.files.items():
            for family in ("trackers", "metrics", "hooks"):
                (folder / "pymodules" / family).mkdir(exist_ok=True)
            assert (folder / path).parent.is_dir(), f"{path} must say where the snippet belongs"
            (folder / path).write_text(text)
    words = ("--stop-after-epoch", "2")
    run_inside(home, "--set", COMMIT_OFTEN, *words, name="whole")
    with contextlib.suppress(KeyboardInterrupt):
        run_inside(home, "--set", COMMIT_OFTEN, *words, name="parts", disk=EndsInsideAnEpoch())
    # The lock goes with the objects of the run that was interrupted.
    gc.collect()
    assert inspect_results(ExperimentPaths(home, "parts")).progress == Progress(TRAINING, epoch=2, step=2)
    run_inside(home, "--resume", *words, name="parts")
    results = home / "experiment_results"
    assert (results / "whole/data/loss_weight_data/loss_weights_2.json").exists()
    assert first_difference(results / "whole/data", results / "parts/data") is None


@pytest.mark.parametrize("family", [*FAMILIES, *SINGLES])
def test_every_family_has_a_page_with_an_example(family: str) -> None:
    """Each family has a page that shows at least one file of it and says what is saved."""
    page = PYMODULES / f"{family}.md"
    shown = [path for variant in variants() if variant.page == family for path in variant.files]
    assert any(path.startswith((f"pymodules/{family}/", f"pymodules/{family}.py")) for path in shown)
    assert section(page, "In the results").body.strip()


def path_patterns() -> list[str]:
    """Return the documented paths below data/ as regular expressions."""
    cells = [row[0] for row in section(RESULTS, "data/").rows()]
    paths = [path for cell in cells for path in re.findall(r"`([^`]+)`", cell)]
    return [re.sub(r"\b[A-Z]+\b|(?<=_)N\b", "[^/]+", path) + (".+" if path.endswith("/") else "") for path in paths]


def test_paths_of_results_are_documented(digits_home: Path) -> None:
    """Every file below data/ fits a documented path, and every documented path has files."""
    data = digits_home / "experiment_results/digits/data"
    files = [path.relative_to(data).as_posix() for path in data.rglob("*") if path.is_file()]
    patterns = path_patterns()
    assert [file for file in files if not any(re.fullmatch(one, file) for one in patterns)] == []
    unused = [one for one in patterns if not any(re.fullmatch(one, file) for file in files)]
    # The example saves all weights and has neither artifacts nor hooks; the ready checkpoint savers have no state.
    assert unused == [
        "module_ckps/constant/[^/]+.json",
        "artifacts/[^/]+/epoch_[^/]+/.+",
        "hook_data/[^/]+/.+",
        "checkpoint_saver_data/.+",
    ]


def test_top_of_results_is_documented(digits_home: Path) -> None:
    """The tree of the page names everything that lies in a results folder."""
    tree = section(RESULTS, "Results").body
    for entry in (digits_home / "experiment_results/digits").iterdir():
        assert f" {entry.name}{'/' if entry.is_dir() else ''}" in tree


def results_snippets() -> list[str]:
    return [snippet for one in sections(RESULTS) for snippet in one.snippets("python")]


@pytest.mark.parametrize("snippet", results_snippets())
def test_snippets_that_read_results_work(snippet: str, digits_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are read as the page says, and nothing of this package is needed for it."""
    monkeypatch.chdir(digits_home)
    assert "pipeline" not in snippet
    exec(compile(snippet, os.fspath(RESULTS), "exec"), {})


def test_sharded_experiment_of_the_page_trains_and_opens_with_torch(
    digits_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module with units of its own trains sharded, and its folder is read as the page says."""
    module, reading = (text for one in sections(SHARDING) for text in one.snippets("python"))
    home = shutil.copytree(digits_home, tmp_path / "home")
    folder = shutil.copytree(home / "experiment_settings/digits", home / "experiment_settings/sharded")
    (folder / module.split("\n")[0].removeprefix("# ")).write_text(module)
    run_inside(home, "--set", "training.parallelism=fsdp", "--stop-after-epoch", "0", name="sharded")
    monkeypatch.chdir(home)
    exec(compile(reading, os.fspath(SHARDING), "exec"), {})
