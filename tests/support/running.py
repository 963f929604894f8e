"""Running the pipeline: inside this process, as a process of its own, and under a real torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from logging import FileHandler
from pathlib import Path

from pipeline.arguments import parse_arguments
from pipeline.distributed.processes import Processes
from pipeline.progress import Progress
from pipeline.run import run
from pipeline.system.disk import Disk
from pipeline.system.logging import LOGGER

ENTRY = Path(__file__).parents[2] / "training_pipeline.py"
SECONDS = 120


def run_inside(home: Path, *words: str, name: str = "tiny", disk: Disk | None = None) -> Progress:
    """Run in this process, alone; errors are raised. The log file is closed, as it is when a process ends."""
    try:
        return run(parse_arguments([name, "--data-home", str(home), *words]), Processes(), disk)
    finally:
        for handler in [one for one in LOGGER.handlers if isinstance(one, FileHandler)]:
            LOGGER.removeHandler(handler)
            # A test may have filled the disk under the log.
            with contextlib.suppress(OSError):
                handler.close()


def command(
    home: Path, *words: str, name: str = "tiny", nproc: int | None = None, launcher: Sequence[str] = ()
) -> list[str]:
    """Return the command line of a run, under torchrun with the options ``launcher`` if ``nproc`` is given.

    Without, ``launcher`` is a verb that runs it.
    """
    torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={nproc}", *launcher] if nproc else []
    verb = [] if nproc else launcher
    return [sys.executable, *torchrun, str(ENTRY), *verb, name, "--data-home", str(home), *words]


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    # A run that hangs is asked where it stands.
    quiet["PYTHONFAULTHANDLER"] = "1"
    # A run must not share the service process of a W&B run inside this one.
    own = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    return {**own, **quiet, **(more or {})}


def run_process(
    home: Path, *words: str, name: str = "tiny", nproc: int | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run to the end in processes of its own and return exit code and output; one that hangs tells where."""
    line = command(home, *words, name=name, nproc=nproc)
    pipe = subprocess.PIPE
    with subprocess.Popen(line, env=environment(env), stdout=pipe, stderr=pipe, text=True) as process:
        try:
            output, errors = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            _abort(process.pid)
            raise AssertionError(f"the run did not end; output:\n{''.join(process.communicate())}") from None
        finally:
            process.kill()
    return subprocess.CompletedProcess(line, process.returncode, output, errors)


class BackgroundRun:
    """A run in a session of its own that can be killed with everything it has started."""

    def __init__(
        self,
        home: Path,
        *words: str,
        name: str = "tiny",
        nproc: int | None = None,
        env: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (),
    ) -> None:
        self.output = home / f"output_{time.monotonic_ns()}.txt"
        self._mark = f"{time.monotonic_ns()}_{os.getpid()}"
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                command(home, *words, name=name, nproc=nproc, launcher=launcher),
                env=environment({"TEST_RUN_MARK": self._mark, **(env or {})}),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> BackgroundRun:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    def pids(self) -> list[int]:
        """Return every living process of this run: torchrun, its workers and their loader workers."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and self._is_ours(entry):
                found.append(int(entry.name))
        return sorted(found)

    def _is_ours(self, entry: Path) -> bool:
        try:
            return self._mark.encode() in (entry / "environ").read_bytes() and not _is_zombie(entry)
        except OSError:
            return False

    def worker_pids(self) -> list[int]:
        """Return the training processes in the order of their ranks."""
        return sorted((pid for pid in self.pids() if parent_of(pid) == self.process.pid), key=_rank)

    def loader_pids(self, rank: int) -> list[int]:
        """Return the loader workers of one training process."""
        owner = self.worker_pids()[rank]
        return [pid for pid in self.pids() if parent_of(pid) == owner]

    def kill(self) -> None:
        """Kill everything at once, as a power cut would."""
        self.strike()
        for pid in self.pids():
            send(pid, signal.SIGKILL)

    def strike(self) -> None:
        """Kill torchrun and all below it within a millisecond or two; what has no parent any more is not found."""
        if self.process.poll() is None:
            for pid in family(self.process.pid):
                send(pid, signal.SIGKILL)
        self.process.wait(SECONDS)

    def left_alive(self, seconds: float = 15) -> list[int]:
        """Give the processes of an ended run some seconds to follow it and return those that have not."""
        limit = time.monotonic() + seconds
        while (pids := self.pids()) and time.monotonic() < limit:
            time.sleep(0.05)
        return pids

    def wait(self) -> int:
        try:
            return self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            _abort(self.process.pid)
            raise AssertionError(f"the run did not end; output:\n{self.text()}") from None

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_for(self, condition: Callable[[], bool], seconds: float = 60, every: float = 0.01) -> None:
        """Wait until a condition holds; a run that ends first is an error unless it holds then."""
        limit = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > limit or (self.process.poll() is not None and not condition()):
                raise AssertionError(f"the condition never held; output:\n{self.text()}")
            time.sleep(every)


def _abort(pid: int) -> None:
    """End a process and all its descendants, each of which writes down where its threads stand."""
    everyone = family(pid)
    for one in everyone:
        # What one of them meets when it ends must not move the others.
        send(one, signal.SIGSTOP)
    for one in everyone:
        send(one, signal.SIGABRT)
        send(one, signal.SIGCONT)
        time.sleep(0.5)


def end_launched(home: Path) -> None:
    """Kill every run that a verb has started in the background of a data home."""
    for path in home.glob("experiment_torchelastic_error_files/**/launch.json"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(json.loads(path.read_text())["pid"], signal.SIGKILL)


def send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def parent_of(pid: int) -> int:
    try:
        return int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


def family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    try:
        children = [
            one for task in Path(f"/proc/{pid}/task").iterdir() for one in (task / "children").read_text().split()
        ]
    except OSError:
        children = []
    return [pid, *(one for child in children for one in family(int(child)))]


def _rank(pid: int) -> int:
    """Return the rank torchrun gave to a process; one that is just being started has none yet."""
    try:
        variables = (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return -1
    return next((int(one.removeprefix(b"RANK=")) for one in variables if one.startswith(b"RANK=")), -1)


def describe(pid: int) -> str:
    """Return what a process that should be gone is doing: its rank, state, where in the kernel, and what it runs."""
    entry = Path("/proc") / str(pid)
    try:
        state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        where = (entry / "wchan").read_text()
        return f"rank {_rank(pid)} of parent {parent_of(pid)} in state {state} at {where}: {line}"
    except OSError:
        return f"process {pid}, which has just gone"


def _is_zombie(entry: Path) -> bool:
    return (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
