"""Counts kernels and host waits in the steps of a run, on whatever device it has.

    python -m tests.proof.counting EXPERIMENT --data-home HOME

runs an experiment in this process and prints, as JSON, what the device was asked in each step of it;

    python -m tests.proof.counting --by-hand NUM_BATCHES

does the same for steps of a loop written by hand, with the deep model of these tests.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import torch

from pipeline.arguments import parse_arguments
from pipeline.session import TrainingSession
from pipeline.training.engines.base import GradientEngine
from pipeline.training.step import StepObserver, StepOutcome
from pipeline.worker import run_worker
from tests.proof.experiments import deep_model

# Calls of the CUDA runtime, and of HIP's, that launch a kernel or make the host wait.
_LAUNCHES = ("LaunchKernel", "MemcpyAsync", "MemsetAsync")
_WAITS = ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize")


@dataclass(frozen=True)
class StepCounts:
    """What one step asked of the device."""

    kernels: int
    waits: int
    # Whether the next batch was loaded while the device still had work to do.
    loads_while_busy: bool = False


class SimulatedCounter:
    """Reads the counts that the simulated device keeps."""

    def start(self) -> None:
        from tests.support.simulated.queue import QUEUE

        self._before = QUEUE.counts()

    def stop(self) -> StepCounts:
        from tests.support.simulated.queue import QUEUE

        done = QUEUE.counts() - self._before
        return StepCounts(done.kernels, done.waits)


class ProfilerCounter:
    """Counts calls of the runtime library of a real accelerator."""

    def start(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.__enter__()

    def stop(self) -> StepCounts:
        self._profiler.__exit__(None, None, None)
        names = [event.name for event in self._profiler.events() or ()]
        return StepCounts(_count(names, _LAUNCHES), _count(names, _WAITS))


def _count(names: list[str], endings: tuple[str, ...]) -> int:
    return sum(name.startswith(("cuda", "hip")) and any(ending in name for ending in endings) for name in names)


Counter = SimulatedCounter | ProfilerCounter


def new_counter(device_type: str) -> Counter:
    return SimulatedCounter() if device_type == "sim" else ProfilerCounter()


class CountingObserver(StepObserver):
    """Counts from the beginning of every step to its end."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._was_busy = False
        self.steps: list[StepCounts] = []

    def step_begins(self, epoch: int, step: int) -> None:
        self._was_busy = False
        self._counter.start()

    def step_ends(self, outcome: StepOutcome) -> None:
        self.steps.append(replace(self._counter.stop(), loads_while_busy=self._was_busy))

    def watch_loading(self, engine: GradientEngine) -> None:
        """Ask the device, whenever a batch is loaded ahead, whether it still works."""
        prefetching = engine.prefetching

        @contextmanager
        def watched(load_next: Callable[[], None]) -> Iterator[None]:
            def ask_and_load() -> None:
                self._was_busy = not torch.accelerator.current_stream().query()
                load_next()

            with prefetching(ask_and_load):
                yield

        engine.prefetching = watched  # type: ignore[method-assign]


def main(words: list[str]) -> int:
    observers: list[CountingObserver] = []

    def watch(session: TrainingSession) -> None:
        observers.append(CountingObserver(new_counter(session.processes.device.type)))
        session.training.observer = observers[0]
        observers[0].watch_loading(session.engine)

    code = run_worker(parse_arguments(words), watch)
    if observers:
        print(json.dumps([asdict(step) for step in observers[0].steps]))
    return code


def count_by_hand(num_batches: int, num_steps: int = 3) -> list[StepCounts]:
    """Count the steps of a plain loop: batches that lie on the device, gradients accumulated, one value read."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model = deep_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    images = torch.randn(4, 1, 6, 6, device=device)
    targets = torch.zeros(4, device=device)
    counter = new_counter(device.type)
    counts = []
    for _ in range(num_steps):
        counter.start()
        losses = []
        for _ in range(num_batches):
            loss = ((model(images)[:, 0] - targets) ** 2).mean() / num_batches
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        torch.stack(losses).sum().item()
        counts.append(counter.stop())
    return counts


if __name__ == "__main__":
    if sys.argv[1] == "--by-hand":
        print(json.dumps([asdict(step) for step in count_by_hand(int(sys.argv[2]))]))
        sys.exit(0)
    sys.exit(main(sys.argv[1:]))
