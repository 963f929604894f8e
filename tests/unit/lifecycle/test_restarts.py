"""A restart by torchrun is distinguished from a start by a person."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.distributed.processes import Processes
from pipeline.lifecycle import provenance
from pipeline.lifecycle.provenance import was_started_before
from pipeline.paths import ExperimentPaths
from pipeline.system.launcher_watchdog import launcher_mark
from tests.support.running import run_inside


@pytest.fixture
def paths(begun: Path) -> ExperimentPaths:
    """An experiment that stands after its first epoch."""
    return ExperimentPaths(begun, "tiny")


def launched_by(paths: ExperimentPaths, *launchers: object) -> None:
    """Let the latest start have been made by these torchruns."""
    *earlier, last = paths.starts_file.read_text().splitlines()
    lines = [*earlier, json.dumps({**json.loads(last), "launchers": launchers})]
    paths.starts_file.write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize(
    ("launchers", "expected"), [(("mine",), True), (("other", "mine"), True), (("other",), False), ((), False)]
)
def test_torchrun_that_made_the_latest_start_goes_on(
    paths: ExperimentPaths, monkeypatch: pytest.MonkeyPatch, launchers: tuple[str, ...], expected: bool
) -> None:
    """Whichever machines have come or gone since, one torchrun of before is enough."""
    monkeypatch.setattr(provenance, "launcher_mark", lambda: "mine")
    launched_by(paths, *launchers)
    assert was_started_before(paths, Processes()) is expected


def test_start_without_torchrun_is_never_a_restart(paths: ExperimentPaths) -> None:
    """Two runs by hand in one shell have the same parent, and still are two runs."""
    assert launcher_mark() is None
    launched_by(paths, None)
    assert not was_started_before(paths, Processes())


def test_restart_with_reset_goes_on_instead_of_resetting_again(
    paths: ExperimentPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What --reset asked for has been done by the processes before."""
    monkeypatch.setattr(provenance, "launcher_mark", lambda: "mine")
    launched_by(paths, "mine")
    run_inside(paths.home, "--reset", "--stop-after-epoch", "2")
    assert len(paths.starts_file.read_text().splitlines()) == 2
