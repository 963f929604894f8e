"""What can happen to some of the processes of a run: each scenario is one life, and what must hold at its end."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from pipeline.distributed.processes import TIMEOUT_VARIABLE
from tests.crash.experiment import (
    GATE,
    GATE_FOLDER,
    NUM_EPOCHS,
    NUM_STEPS,
    WITNESS,
    is_writing,
    last_committed_step,
    last_logged_step,
    log_text,
)
from tests.support.running import BackgroundRun, run_process, send

PHASES = ("initialisation", "training", "validation", "commit")
SECONDS_TO_END = 60


class Victim:
    """An experiment that lives through one scenario after another and is then left to finish."""

    def __init__(self, home: Path, nproc: int) -> None:
        self.home, self.nproc = home, nproc
        self._num_characters = 0

    @property
    def last_rank(self) -> int:
        return self.nproc - 1

    @property
    def has_room(self) -> bool:
        """Return whether enough epochs are left for another scenario."""
        return last_committed_step(self.home) < NUM_STEPS * (NUM_EPOCHS - 2)

    @contextlib.contextmanager
    def started(
        self, launcher: Sequence[str] = (), env: dict[str, str] | None = None, gate: str = ""
    ) -> Iterator[BackgroundRun]:
        """Start or continue the run."""
        for path in (self.home / "reached", self.home / "open", *self.home.glob("witness_*")):
            path.unlink(missing_ok=True)
        self._num_characters = len(log_text(self.home))
        variables = {GATE: gate, GATE_FOLDER: str(self.home), WITNESS: str(self.home / "witness_"), **(env or {})}
        with BackgroundRun(self.home, "--auto", nproc=self.nproc, env=variables, launcher=launcher) as run:
            yield run

    @contextlib.contextmanager
    def caught(
        self, phase: str, rank: int = 0, launcher: Sequence[str] = (), env: dict[str, str] | None = None
    ) -> Iterator[BackgroundRun]:
        """Start or continue the run and hold a rank where it enters a phase; commits are made by rank 0 alone."""
        # Not at the first of them: a start that has committed nothing yet has nothing to continue from.
        holder, number = 0 if phase == "commit" else rank, 3 if phase in ("training", "commit") else 1
        with self.started(launcher, env, f"{phase}:{holder}:{number}") as run:
            run.wait_for((self.home / "reached").exists)
            assert is_writing(self.home) or phase != "commit"
            yield run

    def open_gate(self) -> None:
        (self.home / "open").touch()

    @property
    def log(self) -> str:
        """What the log says since the latest start."""
        return log_text(self.home)[self._num_characters :]

    def finish(self) -> None:
        done = run_process(self.home, "--auto", nproc=self.nproc)
        assert done.returncode == 0, done.stderr

    def check_failed(self, run: BackgroundRun) -> None:
        """The run ends with an error, soon, and takes all its processes along."""
        started = time.monotonic()
        assert run.wait() != 0
        assert time.monotonic() - started < SECONDS_TO_END, run.text()
        assert run.left_alive() == [], run.text()

    def check_stopped(self, run: BackgroundRun, code: int) -> None:
        """All ranks stop cleanly at the same step, which is committed, and leave nobody behind."""
        assert run.wait() == code, run.text()
        assert run.left_alive() == [], run.text()
        assert self.log.count(" stopped at ") == 1, run.text()
        assert last_committed_step(self.home) == last_logged_step(self.home)
        taken = {path.name: path.read_text().count("step") for path in self.home.glob("witness_*")}
        assert len(set(taken.values())) <= 1, taken


def kill_rank(victim: Victim, phase: str, rank: int) -> None:
    """SIGKILL to one rank alone ends all."""
    with victim.caught(phase, rank) as run:
        send(run.worker_pids()[rank], signal.SIGKILL)
        victim.open_gate()
        victim.check_failed(run)


def pause_rank(victim: Victim, phase: str, rank: int, seconds: float) -> None:
    """A rank that stands still for a while holds up the others and nothing else; the run goes on to its end."""
    with victim.caught(phase, rank) as run:
        pid = run.worker_pids()[rank]
        send(pid, signal.SIGSTOP)
        victim.open_gate()
        time.sleep(seconds)
        assert run.process.poll() is None
        send(pid, signal.SIGCONT)
        assert run.wait() == 0, run.text()
        assert run.left_alive() == [], run.text()
    assert victim.log.count("state:") == 1


def freeze_rank(victim: Victim, phase: str, rank: int, seconds: float = 6) -> None:
    """A rank that stands still for ever makes the others give up when the time for talking to it is over."""
    limit = {TIMEOUT_VARIABLE: str(seconds / 60)}
    with victim.caught(phase, rank, ["--shutdown-timeout=1"], limit) as run:
        send(run.worker_pids()[rank], signal.SIGSTOP)
        victim.open_gate()
        victim.check_failed(run)


def kill_loader_worker(victim: Victim) -> None:
    """A loader worker taken by the kernel, as when memory is short, ends all with a message that names it."""
    with victim.caught("training") as run:
        # Only rank 0 is sure to have batches of the dataset that is loaded by a worker.
        send(run.loader_pids(rank=0)[0], signal.SIGKILL)
        victim.open_gate()
        victim.check_failed(run)
        assert "DataLoader worker" in run.text()
        assert "Killed" in run.text()


def kill_launcher(victim: Victim, phase: str) -> None:
    """When torchrun is killed, its processes notice and leave instead of training on."""
    with victim.caught(phase, victim.last_rank) as run:
        before = last_committed_step(victim.home)
        send(run.process.pid, signal.SIGKILL)
        run.wait()
        # Long enough for every process to see it.
        time.sleep(1.5)
        victim.open_gate()
        assert run.left_alive() == [], run.text()
        assert last_committed_step(victim.home) <= before + 2 * NUM_STEPS


def kill_launcher_at_once(victim: Victim) -> None:
    """When torchrun is killed before its processes have met, they do not wait for each other."""
    with victim.started() as run:
        run.wait_for(lambda: len(run.worker_pids()) == victim.nproc)
        time.sleep(1)
        send(run.process.pid, signal.SIGKILL)
        run.wait()
        assert run.left_alive() == [], run.text()
    assert victim.log == ""


def restart(victim: Victim, phase: str, rank: int) -> None:
    """torchrun's own restart goes on like a resume and brings the run to its end."""
    with victim.caught(phase, rank, ["--max-restarts=3"]) as run:
        send(run.worker_pids()[rank], signal.SIGKILL)
        victim.open_gate()
        assert run.wait() == 0, run.text()
        assert run.left_alive() == [], run.text()
    assert victim.log.count("state: continues at") >= 1


def signal_launcher(victim: Victim, number: int, phase: str, times: int = 1) -> None:
    """A signal to torchrun reaches all ranks, which stop at the same step; torchrun itself always says 1."""
    with victim.caught(phase, victim.last_rank) as run:
        for _ in range(times):
            send(run.process.pid, number)
            time.sleep(0.3)
        victim.open_gate()
        victim.check_stopped(run, code=1)


def signal_rank(victim: Victim, number: int, rank: int) -> None:
    """A signal to one rank stops all at the same step, and torchrun sees nothing but successes."""
    with victim.caught("training", victim.last_rank) as run:
        send(run.worker_pids()[rank], number)
        victim.open_gate()
        victim.check_stopped(run, code=0)


def terminate_too_fast(victim: Victim, grace: float) -> None:
    """SIGTERM, and SIGKILL of everything before the ranks could stop, is a kill like any other."""
    with victim.caught("training", victim.last_rank) as run:
        send(run.process.pid, signal.SIGTERM)
        victim.open_gate()
        time.sleep(grace)
        run.strike()
        assert run.left_alive() == [], run.text()


Scenario = Callable[[Victim], None]


def rank_scenarios(nproc: int) -> list[Scenario]:
    """Return all that happens to single processes and needs a resume."""
    last = nproc - 1
    return [
        *(partial(kill_rank, phase=phase, rank=rank) for phase in PHASES for rank in dict.fromkeys((0, last))),
        partial(freeze_rank, phase="training", rank=last),
        partial(freeze_rank, phase="commit", rank=0),
        kill_loader_worker,
        *(partial(kill_launcher, phase=phase) for phase in PHASES),
        kill_launcher_at_once,
    ]


def signal_scenarios(nproc: int) -> list[Scenario]:
    """Return all ways of being asked to stop, with and without enough time."""
    return [
        *(partial(signal_launcher, number=signal.SIGTERM, phase=phase) for phase in PHASES[1:]),
        partial(signal_launcher, number=signal.SIGTERM, phase="training", times=2),
        partial(signal_launcher, number=signal.SIGINT, phase="training"),
        partial(signal_rank, number=signal.SIGUSR1, rank=0),
        partial(signal_rank, number=signal.SIGTERM, rank=nproc - 1),
        partial(terminate_too_fast, grace=0.0),
        partial(terminate_too_fast, grace=0.5),
    ]
