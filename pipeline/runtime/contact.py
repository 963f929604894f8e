"""How a machine notices that another one of its run cannot be reached any more.

Whoever waits for a machine that has lost its power or its cable hears nothing, and would wait for as long as slow work
is given time. The kernels know better: they ask each other over a connection on which nothing else is said, and
answer also for processes that are busy or stopped. A process that merely ends is noticed without that.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from threading import Thread

from torch.distributed.distributed_c10d import Store

from pipeline.runtime.logs import LOGGER

SECONDS_UNTIL_LOST = 60
# Of that time two parts pass in silence, then a question is asked in each.
_NUM_PARTS = 6
_KEY = "contact"
_MOST_BYTES = 400
OnLoss = Callable[[str], None]


def has_several_machines() -> bool:
    """Tell whether several torchruns work together."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1


def seconds_until_lost(timeout: timedelta) -> int:
    """Return how long a machine may be out of reach: no longer than anyone would wait for it anyway."""
    return _NUM_PARTS * max(1, min(SECONDS_UNTIL_LOST, int(timeout.total_seconds())) // _NUM_PARTS)


def keep_contact(rank: int, store: Store, limit: int, on_loss: OnLoss) -> None:
    """Watch the others from rank zero, and rank zero from one process of every other machine."""
    if rank == 0:
        _open(store, limit, on_loss)
    elif os.environ.get("GROUP_RANK") != "0" and os.environ.get("LOCAL_RANK") == "0":
        port, word, host = store.get(_KEY).decode().split()
        _in_background(partial(_call, int(port), word, host, limit, on_loss))


def _open(store: Store, limit: int, on_loss: OnLoss) -> None:
    """Take calls; only those who know the word that rank zero told the others are listened to."""
    has_both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both else socket.AF_INET
    server, word = socket.create_server(("", 0), family=family, dualstack_ipv6=has_both), secrets.token_hex(16)
    store.set(_KEY, f"{server.getsockname()[1]} {word} {socket.gethostname()}")

    def take_calls() -> None:
        while True:
            connection, _ = server.accept()
            _in_background(partial(_listen, connection, word, limit, on_loss))

    _in_background(take_calls)


def _listen(connection: socket.socket, word: str, limit: int, on_loss: OnLoss) -> None:
    connection.settimeout(limit)
    try:
        said, _, host = connection.recv(_MOST_BYTES).decode(errors="replace").partition(" ")
    except OSError:
        said, host = "", ""
    if secrets.compare_digest(said.encode(), word.encode()):
        _watch(connection, host, limit, on_loss)
    connection.close()


def _call(port: int, word: str, host: str, limit: int, on_loss: OnLoss) -> None:
    try:
        connection = socket.create_connection((os.environ["MASTER_ADDR"], port), timeout=limit)
        connection.sendall(f"{word} {socket.gethostname()}".encode())
    except OSError as error:
        LOGGER.warning("Machine %s cannot be watched (%s): should it be lost, this is noticed late.", host, error)
        return
    _watch(connection, host, limit, on_loss)


def _watch(connection: socket.socket, host: str, limit: int, on_loss: OnLoss) -> None:
    """Wait on a connection until the other process ends or its machine does not answer any more."""
    part = limit // _NUM_PARTS
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2 * part)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, part)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_PARTS - 2)
    try:
        connection.recv(1)
    except OSError:
        on_loss(host)


def _in_background(action: Callable[[], None]) -> None:
    Thread(target=action, name="contact", daemon=True).start()
