"""Collectives of the simulated device: gloo's, launched into the queue as NCCL's are launched into a stream."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from tests.support.simulated.memory import NAME, host_view, is_simulated
from tests.support.simulated.queue import QUEUE, plain_execution

BACKEND = "simgloo"


class LaunchedWork(Work):
    """A collective in the queue; waiting for it makes the device wait, not the host."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def result(self) -> Any:
        return self._result

    def get_future(self) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._result)
        return future


class SimulatedGroup(dist.ProcessGroup):
    """Runs collectives of the host at once, and those of the device in order with its other commands.

    The two have connections of their own, as NCCL and gloo have: the queues of two ranks are not equally far when
    their hosts talk to each other.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._host = dist.ProcessGroupGloo(dist.PrefixStore("host", store), rank, size, timeout)
        self._device = dist.ProcessGroupGloo(dist.PrefixStore("device", store), rank, size, timeout)

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        return "0"

    def _call(self, name: str, tensors: list[torch.Tensor], call: Callable[[Any, list[torch.Tensor]], Any]) -> Any:
        if not is_simulated(tensors[0]):
            return call(self._host, tensors)
        with plain_execution():
            on_host = [host_view(tensor) for tensor in tensors]
        QUEUE.launch(functools.partial(self._complete, call, on_host), name)
        return LaunchedWork(tensors)

    def _complete(self, call: Callable[[Any, list[torch.Tensor]], Any], tensors: list[torch.Tensor]) -> None:
        try:
            call(self._device, tensors).wait()
        except RuntimeError:
            # A kernel of NCCL that waits for a lost peer never ends, and neither does the host that waits for it.
            while True:
                time.sleep(60)

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        options = options or dist.AllreduceOptions()
        return self._call("all_reduce", tensors, lambda group, given: group.allreduce(given, options))

    def broadcast(self, tensors: Any, options: Any) -> Any:
        return self._call("broadcast", tensors, lambda group, given: group.broadcast(given, options))

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        return self._call(
            "all_gather", [inputs[0], *outputs[0]], lambda group, given: group.allgather([given[1:]], [given[0]])
        )

    def _allgather_base(self, output: Any, tensor: Any, options: Any = None) -> Any:
        size = self.size()
        return self._call(
            "all_gather",
            [tensor, output],
            lambda group, given: group.allgather([list(given[1].view(size, *given[0].shape))], [given[0]]),
        )

    def all_gather_single(self, output: Any, tensor: Any, options: Any = None) -> Any:
        return self._allgather_base(output, tensor, options)

    def gather(self, outputs: Any, inputs: Any, options: Any) -> Any:
        gathered = outputs[0] if outputs else []
        return self._call(
            "gather",
            [inputs[0], *gathered],
            lambda group, given: group.gather([given[1:]] if outputs else [], [given[0]], options),
        )

    def alltoall_base(self, output: Any, tensor: Any, output_sizes: Any, input_sizes: Any, options: Any = None) -> Any:
        return self._call(
            "all_to_all",
            [output, tensor],
            lambda group, given: group.alltoall_base(*given, output_sizes, input_sizes),
        )

    def send(self, tensors: Any, peer: int, tag: int) -> Any:
        return self._call("send", tensors, lambda group, given: group.send(given, peer, tag))

    def recv(self, tensors: Any, peer: int, tag: int) -> Any:
        return self._call("recv", tensors, lambda group, given: group.recv(given, peer, tag))

    def barrier(self, options: Any = None) -> Any:
        return self._host.barrier()


def create_group(store: Any, rank: int, size: int, timeout: timedelta) -> SimulatedGroup:
    return SimulatedGroup(store, rank, size, timeout)


def register() -> None:
    dist.Backend.register_backend(BACKEND, create_group, devices=["cpu", NAME])
