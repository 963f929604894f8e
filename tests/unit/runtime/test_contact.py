"""Machines that watch each other, with this machine in both parts."""

from __future__ import annotations

import socket
from datetime import timedelta
from queue import Queue

import pytest
import torch.distributed as dist

from pipeline.runtime import contact
from pipeline.runtime.contact import has_several_machines, keep_contact, seconds_until_lost


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


def test_lost_machine_is_told_by_name_after_the_time_that_was_given() -> None:
    """The kernel asks four times within the last two thirds of the time, then its silence is told."""
    connection, lost = CutConnection(), []
    contact._watch(connection, "node1", 60, lost.append)  # type: ignore[arg-type]
    assert lost == ["node1"]
    assert connection.options[socket.SO_KEEPALIVE] == 1
    idle, every, count = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    assert connection.options[idle] + connection.options[every] * connection.options[count] == 60


def test_both_sides_are_watched_and_an_ordinary_end_is_no_loss(
    second_machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each side waits for the name of the other; one that ends closes its connection, and nobody is told."""
    watched: Queue[str] = Queue()
    monkeypatch.setattr(contact, "_watch", lambda connection, host, limit, on_loss: watched.put(host))
    store = dist.HashStore()
    keep_contact(0, store, 6, pytest.fail)
    keep_contact(1, store, 6, pytest.fail)
    assert [watched.get(timeout=20) for _ in range(2)] == [socket.gethostname()] * 2


def test_stranger_on_the_port_is_not_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only who knows the word from the store is watched; others are hung up on."""
    monkeypatch.setattr(contact, "_watch", lambda *words: pytest.fail("listened to a stranger"))
    store = dist.HashStore()
    keep_contact(0, store, 6, pytest.fail)
    with socket.create_connection(("localhost", int(store.get("contact").split()[0]))) as stranger:
        stranger.sendall(b"hello")
        stranger.settimeout(20)
        assert stranger.recv(1) == b""


def test_machine_that_cannot_be_called_is_a_warning(second_machine: None, caplog: pytest.LogCaptureFixture) -> None:
    """Behind a firewall a run works as well; a loss is then noticed later."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    contact._call(port, "word", "node0", 6, pytest.fail)
    assert "Machine node0 cannot be watched" in caplog.text


@pytest.mark.parametrize(("minutes", "seconds"), [(30, 60), (0.25, 12), (0.01, 6)])
def test_nobody_is_waited_for_longer_than_the_timeout(minutes: float, seconds: int) -> None:
    """A minute, or what the timeout allows, in whole sixths."""
    assert seconds_until_lost(timedelta(minutes=minutes)) == seconds


def test_one_torchrun_is_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a second torchrun there is nobody to lose."""
    assert not has_several_machines()
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert has_several_machines()
