"""The verbs `compare` and `clean`."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from pathlib import Path

import pytest

from pipeline.paths import ExperimentPaths
from pipeline.store.compare import first_difference
from pipeline.system.files import num_bytes
from tests.support.experiments import tree, write_experiment
from tests.support.running import run_inside
from tests.support.verbs import call, held


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data home with a finished experiment and a variant that stopped after two epochs."""
    home = tmp_path_factory.mktemp("trained")
    write_experiment(home)
    write_experiment(home, "variant", training={"seed": 4})
    run_inside(home)
    run_inside(home, "--stop-after-epoch", "2", name="variant")
    return home


@pytest.fixture
def both(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "home")


def test_comparison_shows_values_and_what_differs(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows are states, values and the settings that are not alike; those that are stay out."""
    assert call(trained, "compare", "tiny", "variant") == 0
    text = capsys.readouterr().out
    rows = {words[0]: words[1:] for line in text.splitlines() if (words := re.split(r"\s{2,}", line.strip()))}
    assert rows["state"] == ["finished", "stopped"]
    assert rows["last epoch"] == ["3", "2"]
    assert rows["training.seed"] == ["3", "4"]
    assert "step_min_items" not in text


def test_comparison_as_csv_has_a_row_per_experiment(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A spreadsheet gets whole numbers, one experiment per row."""
    assert call(trained, "compare", "--csv") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["experiment"] for row in rows] == ["tiny", "variant"]
    assert float(rows[0]["best loss_a"]) > 0
    assert call(trained, "compare", "--json") == 0
    assert json.loads(capsys.readouterr().out)["variant"]["training.seed"] == 4


def test_tries_are_compared_only_if_they_are_named(both: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A try has seen a part of the data, so its values must not pass for a run's."""
    run_inside(both, "--limit-batches", "1", "--set", "training.max_epochs=1")
    capsys.readouterr()
    assert call(both, "compare", "--csv") == 0
    assert "tiny.try" not in capsys.readouterr().out
    assert call(both, "compare", "tiny", "tiny.try") == 0
    assert "tiny.try" in capsys.readouterr().out


@pytest.mark.parametrize("columns", [80, 120])
def test_comparison_fits_the_terminal(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """However many experiments there are, no line wraps."""
    monkeypatch.setenv("COLUMNS", str(columns))
    call(trained, "compare", *(["tiny", "variant"] * 6))
    assert max(map(len, capsys.readouterr().out.splitlines())) <= columns


def test_comparison_of_nothing_is_told(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without results there is nothing to show, and a name without results is refused."""
    assert call(home, "compare") == 0
    assert "no results" in capsys.readouterr().out
    assert call(home, "compare", "tiny") == 2


def test_cleaning_without_yes_deletes_nothing(both: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What would go is told with its size, and nothing is touched."""
    before = tree(both)
    assert call(both, "clean", "tiny", "variant") == 0
    assert "pool epoch_2" in capsys.readouterr().out
    assert tree(both) == before


def test_cleaning_a_finished_experiment_frees_what_it_said(both: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Epoch pools and optimizer states go, best and last stay, and every digest still holds."""
    paths = ExperimentPaths(both, "tiny")
    size = num_bytes(paths.results)
    assert call(both, "clean", "tiny", "--yes") == 0
    assert num_bytes(paths.results) < size
    assert sorted(path.name for path in (paths.data / "module_ckps").iterdir()) == ["best", "frzn", "init", "last"]
    assert not (paths.data / "optim_ckps").exists()
    capsys.readouterr()
    assert call(both, "fsck", "tiny") == 0
    assert call(both, "clean", "tiny") == 0
    assert "nothing to free" in capsys.readouterr().out


def test_cleaned_experiment_resumes_to_the_same_bits(both: Path) -> None:
    """What a resume needs is never freed."""
    shutil.copytree(both, both / "untouched", symlinks=True)
    assert call(both, "clean", "variant", "--yes") == 0
    for home in (both, both / "untouched"):
        run_inside(home, "--resume", name="variant")
    ours, theirs = (ExperimentPaths(home, "variant").data for home in (both, both / "untouched"))
    shutil.rmtree(ours / "module_ckps/epoch_3")
    for pool in (theirs / "module_ckps").glob("epoch_*"):
        shutil.rmtree(pool)
    assert first_difference(ours, theirs) is None


def test_kept_pools_stay(both: Path) -> None:
    """A pool that is named stays; so do optimizers and logs if asked."""
    paths = ExperimentPaths(both, "tiny")
    assert call(both, "clean", "tiny", "--keep", "epoch_3", "--keep", "optimizers", "--yes") == 0
    assert (paths.data / "module_ckps/epoch_3").is_dir()
    assert not (paths.data / "module_ckps/epoch_2").exists()
    assert (paths.data / "optim_ckps").is_dir()


def test_live_experiment_is_not_cleaned(both: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While a run is alive nothing of it is deleted."""
    paths = ExperimentPaths(both, "variant")
    calls = []
    with held(paths, lambda: calls.append(call(both, "clean", "variant", "--yes"))):
        pass
    assert calls == [3]
    assert "in use" in capsys.readouterr().err
