"""Two machines that lose sight of each other for good: the cable is pulled out and stays out."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.results.comparison import first_difference
from tests.runs.test_stopping import step_of
from tests.support.experiments import write_experiment
from tests.support.machines import Machines
from tests.support.running import run_process

RESULTS = Path("experiment_results/tiny")
LONG: dict[str, str | None] = {
    "pymodules/early_stopper.py": """
        from pipeline.components import WeightedLossEarlyStopper

        early_stopper = WeightedLossEarlyStopper(max_epochs=400)
    """
}


@pytest.mark.slow
def test_machines_that_lose_each_other_both_end_and_lose_nothing(tmp_path: Path) -> None:
    """Both sides end with an error that names the other, though torchrun itself would wait, and one can go on."""
    reference, home = tmp_path / "reference", tmp_path / "parted"
    for folder in (reference, home):
        write_experiment(folder, files=LONG, training={"checkpoint_every_steps": 1, "seed": 5})
    with Machines() as machines:
        agents = machines.start_both(home, "--auto")
        machines.wait_for(lambda: step_of(home)[0] >= 2)
        machines.pull_cable()
        assert all(agent.wait() != 0 for agent in agents), machines.said()
        for agent, other in zip(agents, reversed(machines.names), strict=True):
            assert f"Machine {other} has not answered for 12 seconds" in agent.text()
    epoch = str(step_of(home)[0] + 1)
    for folder in (reference, home):
        done = run_process(folder, "--auto", "--stop-after-epoch", epoch, nproc=2)
        assert done.returncode == 0, done.stderr
    assert first_difference(reference / RESULTS / "data", home / RESULTS / "data") is None
