"""Ranks that watch each other, with this machine in all parts."""

from __future__ import annotations

import socket
from datetime import timedelta
from queue import Queue

import pytest
import torch.distributed as dist

from pipeline.distributed import peer_monitor
from pipeline.distributed.peer_monitor import Loss, PeerMonitor, has_several_machines, seconds_until_lost


class CutConnection:
    """A connection whose other end does not answer the kernel's questions."""

    def __init__(self) -> None:
        self.options: dict[int, int] = {}

    def settimeout(self, seconds: float | None) -> None:
        return

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self.options[option] = value

    def recv(self, size: int) -> bytes:
        raise TimeoutError(110, "Connection timed out")


@pytest.fixture
def second_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of the first process on the second of two machines."""
    variables = {"GROUP_WORLD_SIZE": "2", "GROUP_RANK": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def connected_sockets() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a TCP connection."""
    with socket.create_server(("localhost", 0)) as server:
        there = socket.create_connection(server.getsockname())
        here, _ = server.accept()
    return here, there


def new_monitor(*, watches_processes: bool = False) -> tuple[PeerMonitor, Queue[Loss]]:
    """Return a monitor with a limit of six seconds, and the queue of what it reports."""
    losses: Queue[Loss] = Queue()
    return PeerMonitor(6, losses.put, watches_processes=watches_processes), losses


def test_lost_machine_is_reported_by_name_after_the_limit() -> None:
    """The kernel probes four times within the last two thirds of the time, then the loss is reported."""
    connection, lost = CutConnection(), list[Loss]()
    PeerMonitor(60, lost.append, watches_processes=False)._watch(connection, "node1")  # type: ignore[arg-type]
    assert lost == [Loss("node1", 60)]
    assert connection.options[socket.SO_KEEPALIVE] == 1
    idle, every, count = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    assert connection.options[idle] + connection.options[every] * connection.options[count] == 60


def test_both_sides_are_watched(second_machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each side learns the name of the other."""
    watched: Queue[str] = Queue()
    monkeypatch.setattr(PeerMonitor, "_watch", lambda monitor, connection, host: watched.put(host))
    store = dist.HashStore()
    for rank in (0, 1):
        new_monitor()[0].start(rank, store)
    assert [watched.get(timeout=20) for _ in range(2)] == [socket.gethostname()] * 2


@pytest.mark.parametrize("says_farewell", [True, False])
@pytest.mark.parametrize("watches_processes", [True, False])
def test_process_that_ends_without_a_farewell_is_lost(
    monkeypatch: pytest.MonkeyPatch, watches_processes: bool, says_farewell: bool
) -> None:
    """On accelerators, where collectives would not notice; one that has finished says so, and is not missed."""
    monkeypatch.setattr(peer_monitor, "SECONDS_TO_END", 0)
    here, there = connected_sockets()
    monitor, losses = new_monitor(watches_processes=watches_processes)
    other, _ = new_monitor()
    other._connections.append(there)
    if says_farewell:
        other.say_farewell()
    there.close()
    monitor._watch(here, "node1")
    here.close()
    assert losses.qsize() == (watches_processes and not says_farewell)


def test_stranger_on_the_port_is_not_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a peer with the token from the store is watched; other connections are closed."""
    monkeypatch.setattr(PeerMonitor, "_watch", lambda *words: pytest.fail("listened to a stranger"))
    store = dist.HashStore()
    new_monitor()[0].start(0, store)
    with socket.create_connection(("localhost", int(store.get("peer_monitor").split()[0]))) as stranger:
        stranger.sendall(b"hello")
        stranger.settimeout(20)
        assert stranger.recv(1) == b""


def test_machine_that_cannot_be_called_is_a_warning(second_machine: None, caplog: pytest.LogCaptureFixture) -> None:
    """A run also works behind a firewall; a loss is then detected later."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    new_monitor()[0]._connect(port, "token", "node0")
    assert "Cannot monitor host node0" in caplog.text


@pytest.mark.parametrize(("minutes", "seconds"), [(30, 60), (0.25, 12), (0.01, 6)])
def test_peer_is_not_waited_for_longer_than_the_timeout(minutes: float, seconds: int) -> None:
    """A minute, or what the timeout allows, in whole sixths."""
    assert seconds_until_lost(timedelta(minutes=minutes)) == seconds


def test_one_torchrun_is_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a second torchrun there is no machine to lose."""
    assert not has_several_machines()
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert has_several_machines()
