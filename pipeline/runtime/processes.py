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
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from pipeline.arguments import has_launcher
from pipeline.errors import PipelineError, UsageError
from pipeline.paths import number_variable

Result = TypeVar("Result")
_CPU = torch.device("cpu")
_SECONDS_OF_PATIENCE = 5.0
TIMEOUT_VARIABLE = "GORIDEEPSTYLE_TIMEOUT_MINUTES"


@dataclass(frozen=True)
class Processes:
    """This rank among the others.

    One process without torchrun is a group of one: every method then answers without communication.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = _CPU
    store: Store | None = None

    @classmethod
    def join(cls) -> Processes:
        """Join the process group torchrun describes; alone, join nothing."""
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        try:
            device = _device(int(os.environ.get("LOCAL_RANK", "0")))
            timeout = timedelta(minutes=number_variable(TIMEOUT_VARIABLE, 30))
        except PipelineError as error:
            # Every rank finds the same before it can talk to the others.
            raise error.shared() from None
        rank, store = int(os.environ.get("RANK", "0")), None
        if world_size > 1:
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            store = _meeting_place(timeout)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        return cls(rank, world_size, device, store)

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    @property
    def has_joined(self) -> bool:
        """Tell whether there are others, and they can be talked to."""
        return dist.is_initialized()

    @property
    def has_launcher(self) -> bool:
        return has_launcher()

    @property
    def was_restarted(self) -> bool:
        """Tell whether torchrun has started the processes again after a failure."""
        return _num_restarts() > 0

    @property
    def backend(self) -> str:
        return "none" if self.world_size == 1 else str(dist.get_backend())

    def is_first(self, what: str) -> bool:
        """Tell whether this is the first process of all to say so; one that cannot ask must take itself for it."""
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
        dist.broadcast_object_list(box, src=0, device=_CPU)
        return box[0]

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
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def send_from_rank_zero(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by rank zero's, in place."""
        if self.world_size > 1:
            dist.broadcast(tensor, src=0)

    def least(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take the smallest of each element over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MIN)
        return tensor

    def exchange(self, rows: torch.Tensor, num_rows: list[int]) -> torch.Tensor:
        """Send an equal share of the rows to each rank, in rank order; rank ``r`` sends ``num_rows[r]`` to each."""
        received = rows.new_empty((sum(num_rows), rows.shape[1]))
        dist.all_to_all_single(received, rows, num_rows, [num_rows[self.rank]] * self.world_size)
        return received

    def concatenate(self, part: torch.Tensor) -> torch.Tensor:
        """Return the parts of all ranks, of equal length, in rank order."""
        whole = part.new_empty(self.world_size * len(part))
        dist.all_gather_into_tensor(whole, part.contiguous())
        return whole

    def any(self, statement: bool) -> bool:
        """Tell on every rank whether the statement holds on any."""
        return any(self.gather(statement))

    def on_rank_zero(self, action: Callable[[], Result]) -> Result:
        """Let rank zero act for all; every rank gets its answer, or its refusal."""
        answer, error = self.broadcast(_attempt(action) if self.is_rank_zero else (None, None))
        if error is not None:
            raise error.shared()
        return answer  # type: ignore[return-value]

    def together(self, action: Callable[[], Result]) -> Result:
        """Act on every rank; if any rank is refused, all are, with the first refusal."""
        answer, error = _attempt(action)
        refusals = [refusal for refusal in self.gather(error) if refusal is not None]
        if refusals:
            raise refusals[0].shared()
        return answer  # type: ignore[return-value]


def _num_restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _ask(store: Store, key: str, answers: list[int]) -> None:
    with contextlib.suppress(RuntimeError):
        answers.append(store.add(key, 1))


def _meeting_place(timeout: timedelta) -> Store:
    """Return the store in which the processes find each other, without what dead ones have left in it.

    After a failure, a torchrun that is alone keeps its store, and with it the addresses of the processes before:
    whoever reads one of those waits for nobody. Where several torchruns work together they find a new store each
    time, and may not agree on the number of restarts.
    """
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    is_alone = os.environ.get("GROUP_WORLD_SIZE") == "1"
    return PrefixStore(f"restart_{_num_restarts() if is_alone else 0}", store)


def _attempt(action: Callable[[], Result]) -> tuple[Result | None, PipelineError | None]:
    """Return the action's answer or its refusal; any other exception ends this process, and so its peers."""
    try:
        return action(), None
    except PipelineError as error:
        return None, error


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return _CPU
    num_processes, num_gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if num_processes > num_gpus:
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise UsageError(
            f"{num_processes} processes on this machine need {num_processes} GPUs, but {num_gpus} can be seen; "
            + ("CUDA_VISIBLE_DEVICES is not set." if chosen is None else f"CUDA_VISIBLE_DEVICES is {chosen!r}."),
            f"torchrun --nproc-per-node={num_gpus} …, or let CUDA_VISIBLE_DEVICES name {num_processes} GPUs",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def is_lost_peer(error: BaseException) -> bool:
    """Tell whether an exception only says that another process has gone."""
    if isinstance(error, (dist.DistNetworkError, dist.DistBackendError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo" in text or "Connection closed by peer" in text)
