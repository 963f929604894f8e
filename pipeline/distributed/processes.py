"""This process among the others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from pipeline.arguments import has_launcher
from pipeline.distributed.collectives import guard_collectives
from pipeline.distributed.peer_monitor import OnLoss, PeerMonitor, has_several_machines, seconds_until_lost
from pipeline.distributed.rendezvous import has_twins, meet
from pipeline.errors import PipelineError
from pipeline.paths import number_variable
from pipeline.system.accelerators import (
    CPU,
    backend_of,
    bound_device,
    choose_device,
    device_identity,
    shared_device_error,
)

Result = TypeVar("Result")
_SECONDS_OF_PATIENCE = 5.0
# Up to here the time a sum takes is that of its messages, not of its bytes.
_LITTLE = 1 << 20
# The last is what gloo says to everyone who asks again after it has waited in vain.
_WORDS_OF_LOSS = ("gloo", "Connection closed by peer", "Application timeout caused pair closure")
TIMEOUT_VARIABLE = "GORIDEEPSTYLE_TIMEOUT_MINUTES"


@dataclass(frozen=True)
class Processes:
    """This rank among the others.

    One process without torchrun is a group of one: every method then answers without communication.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU
    store: Store | None = None
    # Why the device is the CPU, where that is worth saying.
    device_reason: str = ""

    @classmethod
    def join(cls, wanted_device: str | None = None) -> Processes:
        """Join the process group torchrun describes; alone, join nothing."""
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        try:
            chosen = choose_device(wanted_device)
            timeout = longest_wait()
        except PipelineError as error:
            # Every rank finds the same before it can talk to the others.
            raise error.shared() from None
        device = chosen.device
        rank = int(os.environ.get("RANK", "0"))
        store = None
        if world_size > 1:
            store = meet(rank, world_size, timeout)
            guard_collectives()
            if has_twins(store, world_size, device_identity(device)):
                raise shared_device_error().shared()
            dist.init_process_group(
                backend_of(device),
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=timeout,
                device_id=bound_device(device),
            )
        return cls(rank, world_size, device, store, chosen.reason)

    def watch_peers(self, on_loss: OnLoss) -> PeerMonitor:
        """Call ``on_loss`` from a thread when a collective would wait in vain for another machine or process."""
        has_accelerator = self.device != CPU
        monitor = PeerMonitor(seconds_until_lost(longest_wait()), on_loss, watches_processes=has_accelerator)
        if self.store is not None and (has_accelerator or has_several_machines()):
            monitor.start(self.rank, self.store)
        return monitor

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    @property
    def has_joined(self) -> bool:
        """Return whether there are others, and they can be talked to."""
        return dist.is_initialized()

    @property
    def has_launcher(self) -> bool:
        return has_launcher()

    @property
    def was_restarted(self) -> bool:
        """Return whether torchrun has started this process again after a failure."""
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0

    @property
    def backend(self) -> str:
        return "none" if self.world_size == 1 else str(dist.get_backend())

    def is_first(self, what: str) -> bool:
        """Return whether this is the first process of all to say so; one that cannot ask must take itself for it."""
        answers: list[int] = []
        if self.store is not None:
            # A store on a machine that cannot be reached any more never answers, whatever its timeout is.
            asking = Thread(target=_ask, args=(self.store, f"first_{what}", answers), daemon=True)
            asking.start()
            asking.join(_SECONDS_OF_PATIENCE)
        return not answers or answers[0] == 1

    def barrier(self) -> None:
        self.gather(None)

    def broadcast(self, value: Result) -> Result:
        """Return rank zero's value on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=CPU)
        return box[0]

    def broadcast_tensor(self, tensor: torch.Tensor) -> None:
        """Give a tensor the values that it has on rank zero, in place."""
        if self.world_size > 1 and tensor.numel():
            sent = tensor.detach().contiguous().reshape(-1)
            # As bytes: backends do not know all types.
            dist.broadcast(sent.view(torch.uint8), src=0)
            tensor.detach().copy_(sent.view_as(tensor))

    def gather(self, value: Result) -> list[Result]:
        """Return every rank's value on every rank, in rank order."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def gather_on_rank_zero(self, value: Result) -> list[Result]:
        """Return every rank's value on rank zero, in rank order, and nothing on the others."""
        if self.world_size == 1:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.is_rank_zero else None
        dist.gather_object(value, values, dst=0)
        return values or []

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add a tensor over all ranks, in place."""
        self.all_reduce_async(tensor)()
        return tensor

    def all_reduce_async(self, tensor: torch.Tensor) -> Callable[[], object]:
        """Begin to add a tensor over all ranks, in place; returns what waits for the end."""
        if self.world_size == 1:
            return lambda: None
        if self.world_size == 2 and tensor.device == CPU and tensor.nbytes <= _LITTLE:
            return self._begin_sum_of_two(tensor)
        # What dist.all_reduce does at last; its own checks take half of the time.
        return _everyone().allreduce([tensor]).wait  # type: ignore[no-any-return]

    def _begin_sum_of_two(self, tensor: torch.Tensor) -> Callable[[], object]:
        """All-reduce small tensors between two ranks by send and recv: bit-identical, and faster than gloo's ring."""
        own = tensor.contiguous()
        peer = 1 - self.rank
        other = torch.empty_like(own)
        under_way = [_everyone().send([own], peer, 0), _everyone().recv([other], peer, 0)]

        def finish() -> None:
            for work in under_way:
                work.wait()
            tensor.add_(other)

        return finish

    def all_reduce_min(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take the smallest of each element over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MIN)
        return tensor

    def all_to_all_async(self, sent: torch.Tensor, received: torch.Tensor, num_rows: list[int]) -> Callable[[], object]:
        """Send an equal share of the rows to each rank, in rank order; rank ``r`` sends ``num_rows[r]`` to each.

        Returns what waits for the end; until then the rows must stay as they are.
        """
        shares = [num_rows[self.rank]] * self.world_size
        work = dist.all_to_all_single(received, sent, num_rows, shares, async_op=True)
        return work.wait  # type: ignore[no-any-return]

    def any(self, statement: bool) -> bool:
        """Return, on every rank, whether the statement holds on any."""
        return any(self.gather(statement))

    def on_rank_zero(self, action: Callable[[], Result]) -> Result:
        """Let rank zero act for all; every rank gets its answer, or its refusal."""
        answer, error = self.broadcast(_attempt(action) if self.is_rank_zero else (None, None))
        if error is not None:
            raise error.shared()
        return answer  # type: ignore[return-value]

    def on_all_ranks(self, action: Callable[[], Result]) -> Result:
        """Act on every rank; if any rank is refused, all are, with the first refusal."""
        answer, error = _attempt(action)
        refusals = [refusal for refusal in self.gather(error) if refusal is not None]
        if refusals:
            raise refusals[0].shared()
        return answer  # type: ignore[return-value]


def _everyone() -> Any:
    """Return the group of all processes as torch.distributed's own functions use it, without the checks around them."""
    return dist.group.WORLD


def longest_wait() -> timedelta:
    """Return how long a process waits for the others."""
    return timedelta(minutes=number_variable(TIMEOUT_VARIABLE, 30))


def _ask(store: Store, key: str, answers: list[int]) -> None:
    with contextlib.suppress(RuntimeError):
        answers.append(store.add(key, 1))


def _attempt(action: Callable[[], Result]) -> tuple[Result | None, PipelineError | None]:
    """Return the action's answer or its refusal; any other exception ends this process, and so its peers."""
    try:
        return action(), None
    except PipelineError as error:
        return None, error


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an exception only says that another process has gone."""
    if isinstance(error, (dist.DistNetworkError, dist.DistBackendError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(words in text for words in _WORDS_OF_LOSS)


def is_silent_peer(error: BaseException) -> bool:
    """Return whether an exception says that another process was waited for in vain."""
    return is_lost_peer(error) and "timed out waiting" in str(error).lower()
