"""Detects lost ranks while this one waits for them in a collective.

A machine without power or network never answers, and a collective would wait for it until the timeout of the process
group, which must allow for the slowest batch. TCP keep-alive detects it within a minute: the operating systems probe
each other over idle connections. A heartbeat thread in Python would fall silent while other code holds the interpreter.

A process that merely ends closes its connections. gloo reports that by itself. The kernels of an accelerator do not:
they wait in a stream for the lost peer, and the host waits for them inside the driver. There, a connection that is
closed without a farewell means that the peer has failed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from threading import Thread

from torch.distributed.distributed_c10d import Store

from pipeline.system.logging import LOGGER

SECONDS_UNTIL_LOST = 60
# Time for this process to notice the failure of a peer by itself, and to end, before the monitor reports the loss.
SECONDS_TO_END = 5
# Keep-alive: two sixths of the limit without traffic, then one probe per sixth.
_NUM_PARTS = 6
# Key of the store under which rank 0 publishes its port, the token and its host name.
_KEY = "peer_monitor"
_FAREWELL = b"."
# Enough for token and host name; whatever else connects to the port must not fill the memory.
_MAX_GREETING_BYTES = 400


@dataclass(frozen=True)
class Loss:
    """A lost peer. Its host has not answered for ``silent_seconds``; None means that its process has ended."""

    host: str
    silent_seconds: int | None = None


OnLoss = Callable[[Loss], None]


def has_several_machines() -> bool:
    """Return whether this run has several torchruns, usually one per machine."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1


def seconds_until_lost(timeout: timedelta) -> int:
    """Return how many seconds a machine may be out of reach before it is lost."""
    # At most what a collective would wait anyway; in whole sixths because keep-alive takes whole seconds.
    return _NUM_PARTS * max(1, min(SECONDS_UNTIL_LOST, int(timeout.total_seconds())) // _NUM_PARTS)


class PeerMonitor:
    """Keeps connections between rank 0 and other ranks; calls ``on_loss`` from a thread when one is lost.

    With ``watches_processes`` every rank connects to rank 0; otherwise only the first rank of every other machine.
    """

    def __init__(self, limit: int, on_loss: OnLoss, *, watches_processes: bool) -> None:
        self._limit = limit
        self._on_loss = on_loss
        self._watches_processes = watches_processes
        self._connections: list[socket.socket] = []

    def start(self, rank: int, store: Store) -> None:
        """Begin to watch: rank 0 watches the ranks that connect to it, and they watch rank 0."""
        is_first_of_other_machine = os.environ.get("GROUP_RANK") != "0" and os.environ.get("LOCAL_RANK") == "0"
        if rank == 0:
            self._listen(store)
        elif self._watches_processes or is_first_of_other_machine:
            port, token, host = store.get(_KEY).decode().split()
            _start_thread(partial(self._connect, int(port), token, host))

    def say_farewell(self) -> None:
        """Notify the peers that this process ends normally: its closed connection is then no failure to them."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(_FAREWELL)

    def _listen(self, store: Store) -> None:
        """Accept connections of peers, which authenticate with a token from the store."""
        if has_several_machines():
            # Both versions of IP where possible: MASTER_ADDR may resolve to either.
            is_dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if is_dual else socket.AF_INET
            server = socket.create_server(("", 0), family=family, dualstack_ipv6=is_dual)
        else:
            # On one machine the port must not be reachable from outside.
            server = socket.create_server(("127.0.0.1", 0))
        token = secrets.token_hex(16)
        store.set(_KEY, f"{server.getsockname()[1]} {token} {socket.gethostname()}")

        def accept_all() -> None:
            while True:
                connection, _ = server.accept()
                # A thread for each: one that connects and sends nothing must not keep the others out.
                _start_thread(partial(self._greet, connection, token))

        _start_thread(accept_all)

    def _greet(self, connection: socket.socket, token: str) -> None:
        connection.settimeout(self._limit)
        try:
            given, _, host = connection.recv(_MAX_GREETING_BYTES).decode(errors="replace").partition(" ")
        except OSError:
            given = ""
            host = ""
        # In constant time, so that the token cannot be guessed byte by byte.
        if secrets.compare_digest(given.encode(), token.encode()):
            self._watch(connection, host)
        connection.close()

    def _connect(self, port: int, token: str, host: str) -> None:
        address = os.environ["MASTER_ADDR"] if has_several_machines() else "127.0.0.1"
        try:
            connection = socket.create_connection((address, port), timeout=self._limit)
            connection.sendall(f"{token} {socket.gethostname()}".encode())
        except OSError as error:
            # Behind a firewall a run works all the same, so this is not an error.
            LOGGER.warning(
                "Cannot monitor host %s (%s); its loss would only be detected by the timeout of a collective.",
                host,
                error,
            )
            return
        self._watch(connection, host)

    def _watch(self, connection: socket.socket, host: str) -> None:
        """Wait until the peer ends or its host no longer answers."""
        part = self._limit // _NUM_PARTS
        # Nothing is ever sent before the farewell, so recv blocks until the kernel gives up or the peer ends.
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2 * part)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, part)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_PARTS - 2)
        self._connections.append(connection)
        try:
            received = connection.recv(1)
        except ConnectionResetError:
            # The host answered, but the process is gone.
            received = b""
        except OSError:
            # The keep-alive probes have failed.
            self._on_loss(Loss(host, self._limit))
            return
        if received != _FAREWELL and self._watches_processes:
            time.sleep(SECONDS_TO_END)
            self._on_loss(Loss(host))


def _start_thread(action: Callable[[], None]) -> None:
    # A daemon, so that it does not keep the process alive.
    Thread(target=action, name="peer monitor", daemon=True).start()
