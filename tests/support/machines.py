"""Two machines in one: network namespaces with host names of their own and a cable that can be pulled out."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.running import ENTRY, environment, parent_of, send

# Inside a namespace of its own a port cannot be taken by anyone else.
PORT = 29577
ADDRESSES = ("10.77.0.1", "10.77.0.2")
FIXED = ("--nnodes=2",)
RESTARTING = ("--nnodes=2", "--max-restarts=3")
ELASTIC = ("--nnodes=1:2", "--max-restarts=3")
# Patience that suits a test: torchrun's own is 15 seconds for a dead machine and 30 for one that may still come.
_CONFIGURATION = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=4"
# A machine that comes back needs the first; the second lets a lost one be noticed soon.
_VARIABLES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GORIDEEPSTYLE_TIMEOUT_MINUTES": "0.25"}
# Each machine says its own name, as the lock and the messages do, and may have a disk of its own.
_MACHINE = 'echo "$0" > /proc/sys/kernel/hostname; test -z "$DISK" || mount --bind "$DISK" "$HERE"; exec "$@"'
SECONDS = 120


class Agent:
    """The torchrun of one machine."""

    def __init__(self, line: Sequence[str], output: Path, variables: dict[str, str]) -> None:
        self.output = output
        with output.open("w") as file:
            self.process = subprocess.Popen(
                line, env=environment(variables), stdout=file, stderr=file, start_new_session=True
            )

    def wait(self, seconds: float = SECONDS) -> int:
        return self.process.wait(seconds)

    def text(self) -> str:
        return self.output.read_text(errors="replace")


class Machines:
    """Two machines on one cable, of which one hosts the rendezvous; what still runs on them ends with the test."""

    def __init__(self, host: int = 0) -> None:
        if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
            pytest.skip("network namespaces need root and the programs ip and unshare")
        self.names = [f"node{number}-{os.getpid()}" for number in (0, 1)]
        self._cables = [f"cable{number}-{os.getpid()}" for number in (0, 1)]
        self._host = host
        self.agents: list[Agent] = []

    def __enter__(self) -> Machines:
        for name in self.names:
            _ip("netns", "add", name)
        _ip("link", "add", self._cables[0], "type", "veth", "peer", "name", self._cables[1])
        for name, cable, address in zip(self.names, self._cables, ADDRESSES, strict=True):
            _ip("link", "set", cable, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            _ip("-n", name, "link", "set", cable, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *exception: object) -> None:
        for number, name in enumerate(self.names):
            self.kill(number)
            _ip("netns", "del", name)
        for agent in self.agents:
            agent.wait()

    def start(self, number: int, home: Path, *words: str, options: Sequence[str] = FIXED, disk: str = "") -> Agent:
        """Start a torchrun with one process on a machine; a ``disk`` is seen there in place of the data home."""
        rendezvous = [f"--rdzv-endpoint={ADDRESSES[self._host]}:{PORT}", "--rdzv-backend=c10d", "--rdzv-id=tiny"]
        rendezvous.append(f"--rdzv-conf=is_host={number == self._host},{_CONFIGURATION}")
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--local-addr={ADDRESSES[number]}", *rendezvous]
        run = [*torchrun, "--nproc-per-node=1", *options, str(ENTRY), "tiny", "--data-home", str(home), *words]
        variables = {"GLOO_SOCKET_IFNAME": self._cables[number], **_VARIABLES, "DISK": disk, "HERE": str(home)}
        output = home.with_name(f"{home.name}_machine_{number}_{len(self.agents)}.txt")
        self.agents.append(Agent([*self._inside(number), *run], output, variables))
        return self.agents[-1]

    def _inside(self, number: int) -> list[str]:
        name = self.names[number]
        return ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "sh", "-c", _MACHINE, name]

    def start_both(self, home: Path, *words: str, options: Sequence[str] = FIXED) -> list[Agent]:
        return [self.start(number, home, *words, options=options) for number in (0, 1)]

    def kill(self, number: int) -> None:
        """Kill everything on a machine, torchrun included."""
        while pids := self.pids(number):
            for pid in pids:
                send(pid, signal.SIGKILL)

    def pids(self, number: int) -> list[int]:
        return [int(pid) for pid in _ip("netns", "pids", self.names[number]).split()]

    def worker(self, number: int) -> int:
        """Return the training process of a machine."""
        agents = {agent.process.pid for agent in self.agents}
        return next(pid for pid in self.pids(number) if parent_of(pid) in agents)

    def pull_cable(self) -> None:
        _ip("-n", self.names[0], "link", "set", self._cables[0], "down")

    def plug_cable(self) -> None:
        _ip("-n", self.names[0], "link", "set", self._cables[0], "up")

    def wait_for(self, condition: Callable[[], bool], seconds: float = 90) -> None:
        """Wait until a condition holds, or fail with what the machines have said."""
        limit = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < limit, self.said()
            time.sleep(0.05)

    def said(self) -> str:
        return "\n".join(f"{agent.output.name}\n{agent.text()}" for agent in self.agents)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
