"""Two machines that lose sight of each other: network namespaces with a cable that is pulled out."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pipeline.results.comparison import first_difference
from tests.runs.test_stopping import step_of
from tests.support.experiments import write_experiment
from tests.support.running import ENTRY, environment, run_process

RESULTS = Path("experiment_results/tiny")
# Inside a namespace of its own a port cannot be taken by anyone else.
PORT, ADDRESSES = 29577, ("10.77.0.1", "10.77.0.2")
LONG: dict[str, str | None] = {
    "pymodules/early_stopper.py": """
        from pipeline.components import WeightedLossEarlyStopper

        early_stopper = WeightedLossEarlyStopper(max_epochs=400)
    """
}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """Two network namespaces with a cable between them."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the program ip")
    names = [f"node{number}_{os.getpid()}" for number in (0, 1)]
    cables = [f"cable{number}_{os.getpid()}"[-15:] for number in (0, 1)]
    for name in names:
        ip("netns", "add", name)
    ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
    for name, cable, address in zip(names, cables, ADDRESSES, strict=True):
        ip("link", "set", cable, "netns", name)
        ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
        ip("-n", name, "link", "set", cable, "up")
        ip("-n", name, "link", "set", "lo", "up")
    yield [f"{name} {cable}" for name, cable in zip(names, cables, strict=True)]
    for name in names:
        ip("netns", "del", name)


def start(home: Path, machine: str, number: int) -> subprocess.Popen[bytes]:
    """Start the torchrun of one machine."""
    name, cable = machine.split()
    torchrun = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", f"--node-rank={number}"]
    where = [f"--master-addr={ADDRESSES[0]}", f"--master-port={PORT}"]
    line = [sys.executable, *torchrun, *where, str(ENTRY), "tiny", "--data-home", str(home), "--auto"]
    variables = {"GLOO_SOCKET_IFNAME": cable, "GORIDEEPSTYLE_TIMEOUT_MINUTES": "0.25"}
    with (home / f"machine_{number}.txt").open("w") as output:
        return subprocess.Popen(
            ["ip", "netns", "exec", name, *line],
            env=environment(variables),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


@pytest.mark.slow
def test_machines_that_lose_each_other_both_end_and_lose_nothing(tmp_path: Path, machines: list[str]) -> None:
    """The cable is pulled in mid-epoch: both sides end with an error, and one machine alone can go on."""
    reference, home = tmp_path / "reference", tmp_path / "parted"
    for folder in (reference, home):
        write_experiment(folder, files=LONG, training={"checkpoint_every_steps": 1, "seed": 5})
    with ExitStack() as stack:
        agents = [start(home, machine, number) for number, machine in enumerate(machines)]
        for agent in agents:
            stack.callback(_end, agent)
        _wait_for(lambda: step_of(home)[0] >= 2, agents, home)
        name, cable = machines[0].split()
        ip("-n", name, "link", "set", cable, "down")
        assert [agent.wait(150) for agent in agents] == [1, 1], _said(home)
    epoch = str(step_of(home)[0] + 1)
    for folder in (reference, home):
        done = run_process(folder, "--auto", "--stop-after-epoch", epoch, nproc=2)
        assert done.returncode == 0, done.stderr
    assert first_difference(reference / RESULTS / "data", home / RESULTS / "data") is None


def _end(agent: subprocess.Popen[bytes]) -> None:
    """End an agent with everything it has started: each worker is a session of its own."""
    if agent.poll() is None:
        agent.send_signal(signal.SIGTERM)
        agent.wait(60)


def _said(home: Path) -> str:
    return "\n".join((home / f"machine_{number}.txt").read_text() for number in (0, 1))


def _wait_for(condition: object, agents: list[subprocess.Popen[bytes]], home: Path) -> None:
    limit = time.monotonic() + 90
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < limit, _said(home)
        assert all(agent.poll() is None for agent in agents), _said(home)
        time.sleep(0.1)
