"""Two machines that lose sight of each other for good: the cable is pulled out and stays out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.monitoring.experiment_state import read_overview
from pipeline.paths import ExperimentPaths
from tests.crash.experiment import check_same, committed, prepare
from tests.support.machines import Machines
from tests.support.running import run_process


@pytest.mark.slow
def test_machines_that_lose_each_other_both_end_and_lose_nothing(
    tmp_path: Path, undisturbed: Callable[[int], Path]
) -> None:
    """Both sides end with an error that names the other, though torchrun itself would wait, and one can go on."""
    home = tmp_path / "home"
    prepare(home)
    with Machines() as machines:
        agents = machines.start_both(home, "--auto")
        machines.wait_for(lambda: committed(home).get("progress", {}).get("epoch", 0) >= 2)
        machines.pull_cable()
        assert all(agent.wait() != 0 for agent in agents), machines.said()
        for agent, other in zip(agents, reversed(machines.names), strict=True):
            assert f"Machine {other} has not answered for 12 seconds" in agent.text()
    overview = read_overview(ExperimentPaths(home, "tiny"))
    assert len(overview.experiment.starts) == 1
    assert overview.ended.outcome == "failed"
    assert "has not answered" in overview.ended.errors[0].error
    assert run_process(home, "--auto", nproc=2).returncode == 0
    check_same(undisturbed(2), home)
