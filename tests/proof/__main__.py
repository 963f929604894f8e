"""``make gpu-proof``: the promises that depend on a device, tried on the accelerator of this machine.

Prints a table to send in with a report. ``--simulated`` tries the command itself on the simulated device.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.system.formatting import table
from tests.proof.experiments import write_deep
from tests.support.experiments import tree, write_experiment
from tests.support.running import BackgroundRun, environment, run_process
from tests.support.simulated.environment import SIMULATED

ROOT = Path(__file__).parents[2]
PASSED, FAILED, SKIPPED = "passed", "FAILED", "not tried"


@dataclass(frozen=True)
class Row:
    """What was tried, how it ended, and what is worth knowing about it."""

    what: str
    outcome: str
    detail: str = ""


class Proof:
    """Runs the promises with a number of devices; each method is a row of the table."""

    def __init__(self, folder: Path, num_devices: int, env: dict[str, str]) -> None:
        self._folder = folder
        self._num_devices = num_devices
        self._env = env
        self.is_simulated = bool(env)

    def rows(self) -> Iterator[Row]:
        for nproc in (1, 2):
            yield self._row(f"killed and resumed, {nproc} process(es)", nproc, lambda n=nproc: self._resumes(n))
        for precision in ("fp16", "bf16"):
            yield self._row(
                f"killed and resumed, {precision}", 1, lambda kind=precision: self._resumes(1, precision=kind)
            )
        yield self._row("compiled, killed and resumed", 1, self._resumes_compiled, on_simulated=False)
        yield self._row("exact: 1 and 2 processes have the same bits", 2, self._is_exact)
        yield self._row("fsdp, killed and resumed, 2 processes", 2, self._resumes_sharded, on_simulated=False)
        yield self._row("a killed rank ends the others", 2, self._ends_after_a_loss)
        yield self._row("kernels and host waits per step, 53 BatchNorm layers", 1, self._counts)

    def _row(self, what: str, nproc: int, attempt: Callable[[], str], *, on_simulated: bool = True) -> Row:
        if self.is_simulated and not on_simulated:
            return Row(what, SKIPPED, "the simulated device cannot")
        if nproc > self._num_devices:
            return Row(what, SKIPPED, f"needs {nproc} devices")
        try:
            return Row(what, PASSED, attempt())
        except Exception as error:
            return Row(what, FAILED, str(error).strip().splitlines()[-1][:200] if str(error) else repr(error))

    def _new_home(self, files: dict[str, str | None] | None = None, **training: Any) -> Path:
        home = Path(tempfile.mkdtemp(dir=self._folder))
        write_experiment(home, files=files, training={"deterministic": True, "checkpoint_every_steps": 1, **training})
        return home

    def _finish(self, home: Path, nproc: int, *words: str) -> dict[str, bytes]:
        done = run_process(home, *words, nproc=nproc if nproc > 1 else None, env=self._env)
        if done.returncode != 0:
            raise RuntimeError(done.stdout + done.stderr)
        data = tree(home / "experiment_results" / "tiny" / "data")
        return {name: content for name, (content, _) in data.items() if not name.endswith(".metadata")}

    def _resumes(self, nproc: int, files: dict[str, str | None] | None = None, **training: Any) -> str:
        undisturbed = self._finish(self._new_home(files, **training), nproc)
        home = self._new_home(files, **training)
        for generation in (4, 9):
            with BackgroundRun(home, "--auto", nproc=nproc if nproc > 1 else None, env=self._env) as run:
                run.wait_for(lambda wanted=generation: committed(home) >= wanted)
                run.kill()
        resumed = self._finish(home, nproc, "--auto")
        differing = [name for name in undisturbed if resumed.get(name) != undisturbed[name]]
        if differing:
            raise RuntimeError(f"{len(differing)} of {len(undisturbed)} files differ: {', '.join(differing[:3])}")
        return f"killed twice; {len(undisturbed)} files have the same bytes"

    def _resumes_compiled(self) -> str:
        head = "from torch import nn\n\nmodule = nn.Linear(8, 1)\nsettings = {'compile': True}\n"
        return self._resumes(1, {"pymodules/modules/head_a.py": head})

    def _resumes_sharded(self) -> str:
        return self._resumes(2, parallelism="fsdp")

    def _is_exact(self) -> str:
        one, two = (self._finish(self._new_home(gradient_reduction="exact"), nproc) for nproc in (1, 2))
        if one != two:
            raise RuntimeError(f"{sum(two.get(name) != content for name, content in one.items())} files differ")
        return f"{len(one)} files have the same bytes"

    def _ends_after_a_loss(self) -> str:
        home = self._new_home()
        with BackgroundRun(home, nproc=2, env=self._env) as run:
            run.wait_for(lambda: committed(home) >= 3)
            began = time.monotonic()
            subprocess.run(["kill", "-9", str(run.worker_pids()[1])], check=True)
            run.process.wait(timeout=60)
        return f"after {time.monotonic() - began:.0f} s"

    def _counts(self) -> str:
        home = Path(tempfile.mkdtemp(dir=self._folder))
        write_deep(home, training={"checkpoint_every_steps": None}, logging={"text": {"every_steps": 1000}})
        ours = self._counted("deep", "--data-home", str(home), "--stop-after-epoch", "1")
        by_hand = self._counted("--by-hand", "4")
        kernels, waits = (max(step[kind] for step in ours[1:]) for kind in ("kernels", "waits"))
        detail = f"{kernels} kernels ({by_hand[-1]['kernels']} by hand), {waits} waits"
        if kernels > 1.1 * by_hand[-1]["kernels"] or waits > 1:
            raise RuntimeError(detail)
        return detail

    def _counted(self, *words: str) -> list[dict[str, int]]:
        line = [sys.executable, "-m", "tests.proof.counting", *words]
        done = subprocess.run(line, cwd=ROOT, env=environment(self._env), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        steps: list[dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
        return steps


def committed(home: Path) -> int:
    """Return the number of the last commit."""
    state_file = home / "experiment_results" / "tiny" / "state.json"
    return int(json.loads(state_file.read_text())["generation"]) if state_file.exists() else 0


def describe_device(*, simulated: bool) -> tuple[str, int]:
    """Return the name of the accelerator and how many of it there are."""
    if simulated:
        return "the simulated device", 2
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        raise SystemExit("torch sees no accelerator here; --simulated tries this command without one.")
    name = torch.get_device_module(accelerator).get_device_name(0)
    return f"{name} ({accelerator.type}, {torch.version.cuda or torch.version.hip})", torch.accelerator.device_count()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.proof", description=__doc__)
    parser.add_argument("--simulated", action="store_true", help="use the simulated device")
    simulated = parser.parse_args().simulated
    name, num_devices = describe_device(simulated=simulated)
    print(f"{num_devices} × {name}, torch {torch.__version__}")
    shown = [("what", "outcome", "detail")]
    with tempfile.TemporaryDirectory() as folder:
        for row in Proof(Path(folder), num_devices, SIMULATED if simulated else {}).rows():
            print(f"{row.what}: {row.outcome}", file=sys.stderr, flush=True)
            shown.append((row.what, row.outcome, row.detail))
    print("\n".join(table(shown)))
    outcomes = [row[1] for row in shown[1:]]
    print(f"{outcomes.count(PASSED)} passed, {outcomes.count(FAILED)} failed, {outcomes.count(SKIPPED)} not tried")
    return 1 if FAILED in outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
