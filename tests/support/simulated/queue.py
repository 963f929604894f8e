"""The command queue of the simulated device: operations run when the host waits, not when they are issued."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock

import torch

# A real device has a limited queue too. Once it is full, the oldest commands run; that is not a wait of the host.
MAX_PENDING = 50_000
_AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastPrivateUse1
)


@contextmanager
def plain_execution() -> Iterator[None]:
    """Run operations as kernels run: without autograd, autocast, inference mode or tensor subclasses."""
    with (
        torch.inference_mode(False),
        torch._C.DisableTorchFunction(),
        torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS),
        torch._C._AutoDispatchBelowAutograd(),
    ):
        yield


@dataclass(frozen=True)
class Counts:
    """How many commands were launched so far, and how often the host has waited."""

    kernels: int
    waits: int

    def __sub__(self, other: Counts) -> Counts:
        return Counts(self.kernels - other.kernels, self.waits - other.waits)


class CommandQueue:
    """Commands in the order in which they were launched. Backward passes launch from a thread of their own."""

    def __init__(self) -> None:
        self._pending: deque[Callable[[], object]] = deque()
        self._lock = RLock()
        self._owner = os.getpid()
        self._num_done = 0
        self.kernels: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    @property
    def is_usable(self) -> bool:
        """A context of a device does not survive a fork."""
        return os.getpid() == self._owner

    @property
    def num_done(self) -> int:
        return self._num_done

    @property
    def num_launched(self) -> int:
        return self._num_done + len(self._pending)

    def counts(self) -> Counts:
        return Counts(self.kernels.total(), self.waits.total())

    def launch(self, command: Callable[[], object], name: str) -> None:
        self._refuse_forks()
        with self._lock:
            self.kernels[name] += 1
            self._pending.append(command)
            if len(self._pending) > MAX_PENDING:
                self._run(self.num_launched)

    def wait(self, reason: str, until: int | None = None) -> None:
        """Let the host wait until ``until`` commands are done; by default, all that were launched."""
        self._refuse_forks()
        self.waits[reason] += 1
        self._run(self.num_launched if until is None else until)

    def is_done(self, until: int) -> bool:
        """Answer a poll. Time passes between polls, so that one more command is done at each."""
        self._run(min(until, self._num_done + 1))
        return self._num_done >= until

    def _run(self, until: int) -> None:
        with self._lock, plain_execution():
            while self._pending and self._num_done < until:
                command = self._pending.popleft()
                self._num_done += 1
                command()

    def _refuse_forks(self) -> None:
        if not self.is_usable:
            raise RuntimeError("Cannot re-initialize the simulated device in forked subprocess.")


QUEUE = CommandQueue()
