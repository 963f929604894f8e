"""Two machines that work together: one dies, comes back, is cut off, or has a disk of its own."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline.store.compare import read_any
from tests.crash.experiment import EXPERIMENT, RESULTS, check_same, committed, is_finished, prepare
from tests.support.experiments import tree
from tests.support.machines import ELASTIC, FIXED, RESTARTING, Machines
from tests.support.running import run_process, send

Undisturbed = Callable[[int], Path]
_MODULE_TRANSFORM = "pymodules/module_transforms/a.py"
# Alone it is slow, so that the other machine comes back before all is done.
_SLEEP = '0.4 if __import__("os").environ["WORLD_SIZE"] == "1" else 0.05'
SLOW: dict[str, str | None] = {_MODULE_TRANSFORM: str(EXPERIMENT[_MODULE_TRANSFORM]).replace("0.02", _SLEEP)}
NO_FLAG, RESET = (), ("--reset",)


@pytest.fixture
def machines() -> Iterator[Machines]:
    """Two machines, of which the first is rank zero and hosts the rendezvous."""
    with Machines() as both:
        yield both


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A data home that both machines share."""
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def epoch(home: Path) -> int:
    return int(committed(home).get("progress", {"epoch": -1})["epoch"])


def world_sizes(home: Path) -> list[int]:
    """Return the number of processes of each start so far."""
    path = home / RESULTS / "starts.jsonl"
    return [json.loads(line)["world_size"] for line in path.read_text().splitlines()] if path.exists() else []


def check_equal_to_rounding(reference: Path, home: Path) -> None:
    for path in sorted((reference / RESULTS / "data/loss_reg_data").rglob("*.npz")):
        expected, found = read_any(path), read_any(home / path.relative_to(reference))
        assert np.array_equal(found["items"], expected["items"])
        np.testing.assert_allclose(found["totals"], expected["totals"], rtol=5e-3)


@pytest.mark.slow
def test_machine_that_dies_and_comes_back_changes_no_bit(machines: Machines, home: Path, tmp_path: Path) -> None:
    """The other goes on alone, then both do, exactly; --reset was asked for once, and is not done at every change."""
    for folder, files in ((home, SLOW), (tmp_path / "reference", None)):
        prepare(folder, files, gradient_reduction="exact")
    agents = machines.start_both(home, *RESET, options=ELASTIC)
    machines.wait_for(lambda: world_sizes(home)[-1:] == [2] and epoch(home) >= 1)
    machines.kill(1)
    machines.wait_for(lambda: world_sizes(home)[-1:] == [1])
    agents.append(machines.start(1, home, *RESET, options=ELASTIC))
    machines.wait_for(lambda: world_sizes(home)[-2:] == [1, 2])
    assert [agents[0].wait(), agents[2].wait()] == [0, 0], machines.said()
    assert run_process(tmp_path / "reference", nproc=2).returncode == 0
    check_same(tmp_path / "reference", home)


@pytest.mark.slow
def test_machine_that_dies_ends_a_run_of_fixed_size(machines: Machines, home: Path, undisturbed: Undisturbed) -> None:
    """The other ends non-zero with one sentence, and a resume gives the bits of an undisturbed run."""
    prepare(home)
    agents = machines.start_both(home, options=FIXED)
    machines.wait_for(lambda: epoch(home) >= 2)
    machines.kill(1)
    assert agents[0].wait() == 1
    assert agents[0].text().count("another process of this run has failed or was killed") == 1
    assert run_process(home, "--resume", nproc=2).returncode == 0
    check_same(undisturbed(2), home)


@pytest.mark.slow
def test_machine_that_hosts_the_rendezvous_takes_the_run_with_it(machines: Machines, home: Path) -> None:
    """Nobody can meet any more: the other ends instead of waiting, though it has restarts left."""
    prepare(home, SLOW)
    agents = machines.start_both(home, options=ELASTIC)
    machines.wait_for(lambda: world_sizes(home)[-1:] == [2] and epoch(home) >= 1)
    machines.kill(0)
    assert agents[1].wait() == 1
    assert agents[1].text().count("another process of this run has failed or was killed") == 1


@pytest.mark.slow
def test_restart_over_two_machines_is_a_resume(machines: Machines, home: Path, undisturbed: Undisturbed) -> None:
    """With --max-restarts, a process killed on one machine costs no manual resume and changes no bit."""
    prepare(home)
    agents = machines.start_both(home, *NO_FLAG, options=RESTARTING)
    machines.wait_for(lambda: epoch(home) >= 2)
    send(machines.worker(1), signal.SIGKILL)
    assert [agent.wait() for agent in agents] == [0, 0], machines.said()
    assert len(world_sizes(home)) > 1
    check_same(undisturbed(2), home)


@pytest.mark.slow
def test_machine_of_rank_zero_is_cut_off_and_found_again(home: Path, undisturbed: Undisturbed) -> None:
    """The machine that hosts the rendezvous takes over, one at a time writes, and both go on when the cable is back."""
    prepare(home, SLOW)
    with Machines(host=1) as machines:
        agents = machines.start_both(home, options=ELASTIC)
        machines.wait_for(lambda: world_sizes(home)[-1:] == [2] and epoch(home) >= 1)
        machines.pull_cable()
        machines.wait_for(lambda: world_sizes(home)[-1:] == [1])
        assert f"Machine {machines.names[1]} has not answered for 12 seconds" in agents[0].text()
        machines.plug_cable()
        machines.wait_for(lambda: world_sizes(home)[-2:] == [1, 2] or is_finished(home))
        assert agents[1].wait() == 0, machines.said()
    check_equal_to_rounding(undisturbed(2), home)


@pytest.mark.slow
def test_machines_with_disks_of_their_own_are_refused(machines: Machines, home: Path, tmp_path: Path) -> None:
    """The same path means two folders: told once, at the start, and nothing is written to either."""
    prepare(home)
    other = shutil.copytree(home, tmp_path / "other")
    before = tree(home), tree(other)
    agents = [machines.start(0, home), machines.start(1, home, disk=str(other))]
    assert [agent.wait() for agent in agents] == [1, 1]
    assert machines.said().count("All processes must see the same data home") == 1
    assert machines.names[1] in agents[0].text()
    assert "exitcode  : 2" in agents[0].text()
    assert (tree(home), tree(other)) == before
