"""An experiment is read once for each command, and never changed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from pipeline.monitoring.experiment_state import NEW, read_existing_state, read_liveness, read_overview
from pipeline.paths import ExperimentPaths
from tests.support.verbs import call


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file is read from now on."""
    counts: Counter[str] = Counter()
    read_bytes = Path.read_bytes

    def count(path: Path) -> bytes:
        counts[path.name] += 1
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", count)
    return counts


@pytest.mark.parametrize("verb", ["status", "compare", "report"])
def test_each_file_is_read_once(begun: Path, reads: Counter[str], verb: str) -> None:
    """No small file is read twice, but for state.json: once for the place, once for the manifest it names."""
    assert call(begun, verb, "tiny") == 0
    names = ("manifest.json", "starts.jsonl", "status.json", "run.lock", "launch.json", "journal.jsonl")
    assert max(reads[name] for name in names) == 1
    assert reads["state.json"] <= 2


def test_state_knows_what_the_overview_shows(begun: Path) -> None:
    """What is printed as JSON is what the typed values say."""
    paths = ExperimentPaths(begun, "tiny")
    overview = read_overview(paths)
    experiment = read_existing_state(paths)
    shown = overview.to_json()
    assert shown["committed"] == experiment.results.progress.as_json()
    assert shown["best"] == {"epoch": experiment.best.epoch, "values": experiment.best.values}
    assert shown["num_starts"] == len(experiment.starts)
    assert shown["state"] == read_liveness(paths, experiment).state


def test_experiment_without_results_is_new(home: Path) -> None:
    """There is nothing to read, and that is a state as well."""
    overview = read_overview(ExperimentPaths(home, "tiny"))
    assert (overview.state, overview.experiment.manifest, overview.ended) == (NEW, None, None)
    assert overview.to_json()["history"] == {}
