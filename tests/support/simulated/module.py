"""The Python side of the simulated device: ``torch.sim``, events, streams, generators and memory figures.

torch lets a backend that is written in Python register operators, but not streams, events, allocators and generators.
Those that are asked for are replaced in torch itself. Set up once per process; it cannot be undone.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._device import _device_constructors

from tests.support.simulated.memory import NAME, USAGE, as_bytes, device, new_storage, pin, refuse_second_device
from tests.support.simulated.operators import GENERATOR
from tests.support.simulated.queue import QUEUE

_HostGenerator = torch.Generator
_HostStream = torch.Stream
# What creates a tensor of the host in page-locked memory if it is asked to.
_FACTORIES = ("empty", "zeros", "ones", "full", "rand", "randn", "tensor", "empty_like", "zeros_like", "empty_strided")
_PACKAGE_PRIORITY = 5


class Event:
    """Marks a place in the queue."""

    def __init__(self, device: Any = None, *, enable_timing: bool = False, blocking: bool = False) -> None:
        self._place = 0

    def record(self, stream: Any = None) -> None:
        self._place = QUEUE.num_launched

    def query(self) -> bool:
        return QUEUE.is_done(self._place)

    def synchronize(self) -> None:
        QUEUE.wait("event", self._place)

    def wait(self, stream: Any = None) -> None:
        """There is one stream, in which everything comes in order."""


class Stream(_HostStream):
    """The one stream of the device."""

    def synchronize(self) -> None:
        QUEUE.wait("stream")

    def query(self) -> bool:
        return QUEUE.is_done(QUEUE.num_launched)

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record()
        return event

    def wait_event(self, event: Any) -> None:
        """There is one stream, in which everything comes in order."""

    def wait_stream(self, stream: Any) -> None:
        """There is one stream, in which everything comes in order."""


class _DeviceGenerator(_HostGenerator):
    def __new__(cls) -> _DeviceGenerator:
        return _HostGenerator.__new__(cls, "cpu")

    @property
    def device(self) -> torch.device:
        return device()


class _GeneratorType(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _HostGenerator)


class _Generator(metaclass=_GeneratorType):
    """Creates a generator of the device that is asked for."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return _DeviceGenerator() if torch.device(device).type == NAME else _HostGenerator(device)


class DeviceModule:
    """What torch and its users find as ``torch.sim``; one device, which belongs to one process."""

    Event = Event
    Stream = Stream
    default_generators = (GENERATOR,)

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return QUEUE.is_usable

    def _is_in_bad_fork(self) -> bool:
        return not QUEUE.is_usable

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, wanted: Any) -> None:
        refuse_second_device(wanted if isinstance(wanted, int) else torch.device(wanted).index)

    def get_device_name(self, wanted: Any = None) -> str:
        return "Simulated Device"

    def get_device_properties(self, wanted: Any = None) -> SimpleNamespace:
        return SimpleNamespace(name=self.get_device_name(), uuid=f"{NAME}-{os.getpid()}")

    def manual_seed(self, seed: int) -> None:
        # Commands that draw are in the queue, and draw when they run: so do changes of the generator.
        QUEUE.launch(functools.partial(GENERATOR.manual_seed, seed), "manual_seed")
        QUEUE.kernels["manual_seed"] -= 1

    manual_seed_all = manual_seed

    def get_rng_state(self, wanted: Any = None) -> torch.Tensor:
        QUEUE.wait("generator")
        return GENERATOR.get_state()

    def set_rng_state(self, state: torch.Tensor, wanted: Any = None) -> None:
        QUEUE.wait("generator")
        GENERATOR.set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def synchronize(self, wanted: Any = None) -> None:
        QUEUE.wait("synchronize")

    def current_stream(self, wanted: Any = None) -> Any:
        return torch.accelerator.current_stream()

    class device:
        """Chooses the current device within a block; there is one."""

        def __init__(self, wanted: Any) -> None:
            pass

        def __enter__(self) -> None:
            pass

        def __exit__(self, *exception: object) -> None:
            pass


def _with_pinning(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(create)
    def create_pinned(*arguments: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        tensor = create(*arguments, **named)
        return pin(tensor) if pin_memory else tensor

    return create_pinned


def _synchronize_device(index: int) -> None:
    QUEUE.wait("synchronize")


def _memory_statistics(index: int) -> dict[str, Any]:
    return {"allocated_bytes": {"all": {"current": USAGE.now, "peak": USAGE.peak}}}


def _allocator_is_initialized() -> bool:
    return True


def _location_of(storage: Any) -> str | None:
    return f"{NAME}:0" if storage.device.type == NAME else None


def _load_storage(storage: torch.UntypedStorage, location: str) -> Any:
    if not location.startswith(NAME):
        return None
    loaded = new_storage(storage.nbytes())
    as_bytes(loaded.host).copy_(as_bytes(storage))
    return loaded


def replace_in_torch(module: DeviceModule) -> None:
    """Replace what a backend written in Python cannot provide."""
    torch._C._accelerator_synchronizeDevice = _synchronize_device
    torch._C._accelerator_setDeviceIndex = refuse_second_device
    torch._C._accelerator_isAllocatorInitialized = _allocator_is_initialized
    torch._C._accelerator_getDeviceStats = _memory_statistics
    # torch looks at its own factories once, and must see the originals.
    _device_constructors()
    torch.Generator = _Generator
    torch.Event = Event
    torch.Stream = Stream
    stream = Stream(device=NAME)
    torch._C._accelerator_getStream = lambda index: stream
    for name in _FACTORIES:
        setattr(torch, name, _with_pinning(getattr(torch, name)))
    torch.serialization.register_package(_PACKAGE_PRIORITY, _location_of, _load_storage)
