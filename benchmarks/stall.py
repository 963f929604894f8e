"""How long a commit of 1.2 GB blocks the loop, and when it is durable, against what torch and the machine can do."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from benchmarks.driver import PIPELINE
from benchmarks.rows import Row, Spread, ratios
from pipeline.checkpoint.snapshots import Snapshots
from pipeline.paths import ExperimentPaths
from pipeline.progress import TRAINING, Progress
from pipeline.store.background_commit import Commits
from pipeline.store.changes import Changes
from pipeline.store.lock import RunLock
from pipeline.store.store import ResultsStore
from pipeline.system.disk import Digest, Disk, Writer

HIDDEN, DEPTH = 3200, 10
_NUM_USUAL = 15
Times = tuple[float, float]


def make_state() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model of 400 MB and its AdamW with both moments."""
    model = nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(DEPTH)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model, optimizer


class TimedDisk(Disk):
    """Notes when a commit has become durable; the clean-up that follows is not part of it."""

    committed = 0.0

    def replace_file(self, path: Path, writer: Writer, staging: Path) -> Digest:
        digest = super().replace_file(path, writer, staging)
        self.committed = time.perf_counter()
        return digest


class Contenders:
    """Each returns how long it blocked its caller and after how long all was durable."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model, self.optimizer = make_state()
        moments = [tensor for state in self.optimizer.state.values() for tensor in state.values()]
        self.tensors = [*(one.detach() for one in self.model.parameters()), *moments]
        self.buffers = [torch.empty_like(tensor) for tensor in self.tensors]
        self.num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)
        self._steps = 0
        self._store = self._open_store()

    def _open_store(self) -> ResultsStore:
        paths = ExperimentPaths(self.folder, "bench")
        for folder in (paths.data, paths.generations):
            folder.mkdir(parents=True)
        self.lock = RunLock(paths)
        self.lock.acquire()
        self._snapshots = {True: Snapshots(copies=True), False: Snapshots(copies=False)}
        self._disk = TimedDisk()
        return ResultsStore(paths, self._disk, self.lock.claim)

    def memory(self) -> Times:
        started = time.perf_counter()
        for buffer, tensor in zip(self.buffers, self.tensors, strict=True):
            buffer.copy_(tensor)
        return time.perf_counter() - started, 0.0

    def disk(self) -> Times:
        path, started = self.folder / "plain", time.perf_counter()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
        for tensor in self.buffers:
            view, count = memoryview(tensor.reshape(-1).numpy()).cast("B"), 0
            while count < len(view):
                count += os.write(descriptor, view[count:])
        os.fsync(descriptor)
        os.close(descriptor)
        seconds = time.perf_counter() - started
        path.unlink()
        return seconds, seconds

    def torch_save(self) -> Times:
        path, started = self.folder / "torch.pt", time.perf_counter()
        torch.save(self._state(), path)
        blocked = time.perf_counter() - started
        descriptor = os.open(path, os.O_RDWR)
        os.fsync(descriptor)
        os.close(descriptor)
        seconds = time.perf_counter() - started
        path.unlink()
        return blocked, seconds

    def _state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def dcp_save(self) -> Times:
        started = time.perf_counter()
        dcp.save(self._state(), checkpoint_id=self.folder / "dcp")
        return self._end(started, time.perf_counter() - started)

    def dcp_async_save(self) -> Times:
        started = time.perf_counter()
        future = dcp.async_save(self._state(), checkpoint_id=self.folder / "dcp")
        blocked = time.perf_counter() - started
        future.result()  # type: ignore[union-attr]
        return self._end(started, blocked)

    def _end(self, started: float, blocked: float) -> Times:
        seconds = time.perf_counter() - started
        shutil.rmtree(self.folder / "dcp")
        return blocked, seconds

    def ours(self) -> Times:
        return self._commit(in_background=True)

    def ours_in_front(self) -> Times:
        return self._commit(in_background=False)

    def ours_meanwhile(self) -> Times:
        """Return how much longer than usual steps took while a commit was written behind them."""
        usual = statistics.median(self._work() for _ in range(_NUM_USUAL))
        commits, progress = Commits(self._store, in_background=True), Progress(TRAINING, 1, self._steps + 1)
        self._steps += 1
        commits.begin(lambda: self._changes(True), progress, {})
        commits.complete(lambda: None)
        taken = []
        while commits.is_busy:
            taken.append(self._work() - usual)
        commits.wait()
        commits.close()
        return sum(taken), 0.0

    def _work(self) -> float:
        """Do what a small step does and return how long it took."""
        started = time.perf_counter()
        value = torch.ones(32, HIDDEN)
        for layer in list(self.model)[:2]:  # type: ignore[arg-type]
            value = layer(value)
        value.sum().backward()
        self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - started

    def _commit(self, *, in_background: bool) -> Times:
        commits = Commits(self._store, in_background=in_background)
        self._steps += 1
        started = time.perf_counter()
        progress = Progress(TRAINING, 1, self._steps)
        commits.begin(lambda: self._changes(in_background), progress, {})
        commits.complete(lambda: None)
        blocked = time.perf_counter() - started
        commits.wait()
        commits.close()
        return blocked, self._disk.committed - started

    def _changes(self, in_background: bool) -> Changes:
        snapshots = self._snapshots[in_background]
        weights, size = snapshots.take("module model", self.model)
        moments, more = snapshots.take("optimizer main", self.optimizer)
        return Changes({"model.pt": weights, "optimizer.pt": moments}, num_bytes=size + more)


@contextmanager
def process_group(folder: Path) -> Iterator[None]:
    """The asynchronous save of torch's distributed checkpoint needs one."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def measure(rounds: int) -> list[Row]:
    """Return the rows of a commit alone, over interleaved rounds, the first of which is not counted."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DISK")) as name, process_group(Path(name)):
        contenders = Contenders(Path(name))
        names = (
            "memory",
            "disk",
            "torch_save",
            "dcp_save",
            "dcp_async_save",
            "ours",
            "ours_in_front",
            "ours_meanwhile",
        )
        times: dict[str, list[Times]] = {one: [] for one in names}
        for _ in range(rounds + 1):
            for one in names:
                # What the one before left to the kernel must not be paid for by the next.
                os.sync()
                contender: Callable[[], Times] = getattr(contenders, one)
                times[one].append(contender())
        contenders.lock.release()
        return _rows(contenders.num_bytes, {one: seen[1:] for one, seen in times.items()})


def _rows(num_bytes: int, times: dict[str, list[Times]]) -> list[Row]:
    blocked = {name: [one for one, _ in seen] for name, seen in times.items()}
    durable = {name: [one for _, one in seen] for name, seen in times.items()}
    behind = [after - before for before, after in times["ours"]]
    facts = {
        "GB": num_bytes / 1e9,
        "blocked, s": {name: Spread.of(seen) for name, seen in blocked.items()},
        "durable after, s": {name: Spread.of(seen) for name, seen in durable.items()},
        "torch.save blocks, of ours": ratios(blocked["torch_save"], blocked["ours"]),
        "DCP async_save blocks, of ours": ratios(blocked["dcp_async_save"], blocked["ours"]),
    }
    return [
        _row(
            "f  loop blocked by a commit, of a raw copy in memory", "≤ 1.5", blocked["ours"], blocked["memory"], facts
        ),
        _row("f  written behind it, of a plain write and fsync", "≤ 1.3", behind, durable["disk"]),
        _row("f  steps slowed meanwhile, of that", "≤ 0.2", blocked["ours_meanwhile"], durable["disk"]),
    ]


def _row(label: str, goal: str, own: list[float], of: list[float], facts: Mapping[str, object] | None = None) -> Row:
    return Row(label, goal, {PIPELINE: ratios(own, of)}, facts or {})
