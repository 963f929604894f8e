"""The process group: this rank among the others, and what ranks send each other."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from pipeline.command_lines import has_launcher
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

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
_MAX_SECONDS_TO_ASK = 5.0
# Up to this size the latency of messages decides how long an all-reduce takes, not the number of bytes.
_MAX_EXCHANGED_BYTES = 1 << 20
# Messages of gloo about a lost peer. The last one is raised by every call after one that has timed out.
_LOST_PEER_MESSAGES = ("gloo", "Connection closed by peer", "Application timeout caused pair closure")
TIMEOUT_VARIABLE = "GORIDEEPSTYLE_TIMEOUT_MINUTES"


@dataclass(frozen=True)
class Processes:
    """This rank among the others.

    One process without torchrun is a group of one; all methods then return without communication.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU
    store: Store | None = None
    # Why the device is the CPU although there may be a GPU; shown when a run starts.
    device_reason: str = ""

    @classmethod
    def join(cls, wanted_device: str | None = None) -> Processes:
        """Join the process group that torchrun describes; without torchrun, return a group of one."""
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        try:
            chosen = choose_device(wanted_device)
            timeout = longest_wait()
        except PipelineError as error:
            # Ranks cannot communicate yet, but all of them find the same problem: shared, so rank 0 alone reports it.
            raise error.shared() from None
        device = chosen.device
        rank = int(os.environ.get("RANK", "0"))
        store = None
        if world_size > 1:
            store = meet(rank, world_size, timeout)
            guard_collectives()
            # Before init_process_group, in which NCCL connects and would fail.
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
        """Call ``on_loss`` from a thread when a peer is lost for which a collective would wait."""
        # gloo itself reports a process that ended; the collectives of accelerators do not (see peer_monitor).
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
        """Return whether the process group exists, so that ranks can communicate."""
        return dist.is_initialized()

    @property
    def has_launcher(self) -> bool:
        return has_launcher()

    @property
    def was_restarted(self) -> bool:
        """Return whether torchrun has restarted this process after a failure."""
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0

    @property
    def backend(self) -> str:
        return "none" if self.world_size == 1 else str(dist.get_backend())

    def is_first(self, what: str) -> bool:
        """Return whether this is the first process to ask about ``what``; also True if the store does not answer."""
        answers: list[int] = []

        def ask(store: Store) -> None:
            with contextlib.suppress(RuntimeError):
                answers.append(store.add(f"first_{what}", 1))

        if self.store is not None:
            # In a thread: if the machine of the store is lost, the call never returns, whatever its timeout is.
            thread = Thread(target=ask, args=(self.store,), daemon=True)
            thread.start()
            thread.join(_MAX_SECONDS_TO_ASK)
        # Rather two reports of a failure than none.
        return not answers or answers[0] == 1

    def barrier(self) -> None:
        self.gather(None)

    def broadcast(self, value: Result) -> Result:
        """Return rank 0's value on every rank."""
        if self.world_size == 1:
            return value
        values = [value]
        # Through host memory, whatever the device is.
        dist.broadcast_object_list(values, src=0, device=CPU)
        return values[0]

    def broadcast_tensor(self, tensor: torch.Tensor) -> None:
        """Overwrite a tensor by its values on rank 0, in place."""
        if self.world_size > 1 and tensor.numel():
            values = tensor.detach().contiguous().reshape(-1)
            # As bytes, because backends do not support all dtypes.
            dist.broadcast(values.view(torch.uint8), src=0)
            tensor.detach().copy_(values.view_as(tensor))

    def gather(self, value: Result) -> list[Result]:
        """Return every rank's value on every rank, in rank order."""
        if self.world_size == 1:
            return [value]
        # Placeholders, of which every one is replaced.
        values = [value] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def gather_on_rank_zero(self, value: Result) -> list[Result]:
        """Return every rank's value on rank 0, in rank order, and an empty list on the others."""
        if self.world_size == 1:
            return [value]
        values = [value] * self.world_size if self.is_rank_zero else None
        dist.gather_object(value, values, dst=0)
        return values or []

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-reduce a tensor by addition, in place."""
        self.all_reduce_async(tensor)()
        return tensor

    def all_reduce_async(self, tensor: torch.Tensor) -> Callable[[], object]:
        """Begin to all-reduce a tensor by addition, in place; return a function that waits for the result."""
        if self.world_size == 1:
            return _return_at_once
        # The group's own methods, in which those of torch.distributed end: their checks take half of the time.
        group = dist.group.WORLD
        assert group is not None
        if self.world_size > 2 or tensor.device != CPU or tensor.nbytes > _MAX_EXCHANGED_BYTES:
            return group.allreduce([tensor]).wait
        # Two ranks exchange small tensors, and each adds them: a + b and b + a have the same bits, and gloo's ring
        # takes two to three times as long. From three ranks on, the order of additions matters: they keep the ring.
        sent = tensor.contiguous()
        received = torch.empty_like(sent)
        peer = 1 - self.rank
        pending = [group.send([sent], peer, 0), group.recv([received], peer, 0)]

        def add_received() -> None:
            for work in pending:
                work.wait()
            tensor.add_(received)

        return add_received

    def sum_async(self, tensor: torch.Tensor) -> Callable[[], object]:
        """Begin to add up integers, in place, while this process does something else; return what waits for the sum.

        Not the exchange that two ranks wait for at once: gloo's own threads do the ring, and no core is kept from work.
        """
        if self.world_size == 1:
            return _return_at_once
        group = dist.group.WORLD
        assert group is not None
        return group.allreduce([tensor]).wait

    def all_reduce_min(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-reduce a tensor by elementwise minimum, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MIN)
        return tensor

    def all_to_all_async(self, sent: torch.Tensor, received: torch.Tensor, num_rows: list[int]) -> Callable[[], object]:
        """Begin to send an equal share of the rows to each rank, in rank order: rank ``r`` sends ``num_rows[r]`` rows.

        Returns a function that waits for the end. Until then the rows must not change.
        """
        shares = [num_rows[self.rank]] * self.world_size
        work = dist.all_to_all_single(received, sent, num_rows, shares, async_op=True)
        return work.wait  # type: ignore[no-any-return]

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return every rank's tensor on every rank, in rank order; all have one shape."""
        if self.world_size == 1:
            return tensor[None]
        gathered = tensor.new_empty((self.world_size, *tensor.shape))
        dist.all_gather(list(gathered), tensor)
        return gathered

    def any(self, statement: bool) -> bool:
        """Return, on every rank, whether the statement is true on any rank."""
        return any(self.gather(statement))

    def on_rank_zero(
        self, action: Callable[Parameters, Result], *arguments: Parameters.args, **options: Parameters.kwargs
    ) -> Result:
        """Run an action on rank 0; every rank returns its result or raises its PipelineError."""
        attempt = _attempt(action, *arguments, **options) if self.is_rank_zero else (None, None)
        answer, error = self.broadcast(attempt)
        if error is not None:
            raise error.shared()
        return answer  # type: ignore[return-value]

    def on_all_ranks(
        self, action: Callable[Parameters, Result], *arguments: Parameters.args, **options: Parameters.kwargs
    ) -> Result:
        """Run an action on every rank; if it raises a PipelineError on any rank, all ranks raise the first one."""
        answer, error = _attempt(action, *arguments, **options)
        errors = [refusal for refusal in self.gather(error) if refusal is not None]
        if errors:
            raise errors[0].shared()
        return answer  # type: ignore[return-value]


def _return_at_once() -> None:
    """Wait for nothing: the result of a group of one is there."""


def longest_wait() -> timedelta:
    """Return the timeout of the process group: how long a rank waits for the others."""
    return timedelta(minutes=number_variable(TIMEOUT_VARIABLE, 30))


def _attempt(
    action: Callable[Parameters, Result], *arguments: Parameters.args, **options: Parameters.kwargs
) -> tuple[Result | None, PipelineError | None]:
    """Return the action's result, or its PipelineError as a value that can be sent to other ranks."""
    # Any other exception is a bug. It ends this process, and the collectives of its peers fail with it.
    try:
        return action(*arguments, **options), None
    except PipelineError as error:
        return None, error


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an exception only reports the loss of another process."""
    if isinstance(error, (dist.DistNetworkError, dist.DistBackendError)):
        return True
    text = str(error)
    # gloo raises a plain RuntimeError, so only its message distinguishes it from a bug.
    return isinstance(error, RuntimeError) and any(message in text for message in _LOST_PEER_MESSAGES)


def is_silent_peer(error: BaseException) -> bool:
    """Return whether an exception reports that another process did not answer within the timeout."""
    return is_lost_peer(error) and "timed out waiting" in str(error).lower()
