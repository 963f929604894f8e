"""A run under observation, in a scratch folder: the process that verify-resume and replay start."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from logging import Logger
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn
from torch.optim import Optimizer

from pipeline.arguments import parse_arguments
from pipeline.paths import ExperimentPaths, results_names
from pipeline.serialization.fingerprint import fingerprint
from pipeline.session import TrainingSession
from pipeline.training.engines.base import StepOutcome
from pipeline.training.step_observer import StepObserver
from pipeline.training.step_plan import BatchRef
from pipeline.worker import exit_now, run_worker

Step = tuple[int, int]
_DEEPEST = 3
_FOREIGN = (nn.Module, Optimizer, Logger, type)


class Recorder(StepObserver):
    """Writes down, as JSON lines, what a rank sees; may end the run after a step, or kill it before one."""

    def __init__(self, session: TrainingSession, file: TextIO, plan: dict[str, Any]) -> None:
        self._m = session
        self._file = file
        self._last = self._place(plan["last"])
        self._kill_before = self._place(plan["kill_before"])
        self._looked_at = {self._place(step) for step in plan["look_at"]}
        self._detailed = self._place(plan["detail"])
        self._folder = Path(plan["folder"])
        self._is_first = self._is_seen = True
        self._at: Step = (0, 0)
        self._kept: dict[str, Any] = {}

    def _place(self, step: Any) -> Step | None:
        """Return epoch and step of a step that may be given by its number in the whole experiment."""
        if isinstance(step, int):
            epoch, index = divmod(step - 1, len(self._m.training.plan))
            return epoch + 1, index + 1
        return (step[0], step[1]) if step else None

    def step_begins(self, epoch: int, step: int) -> None:
        self._at = (epoch, step)
        # Where one step alone is wanted, the way to it should take no longer than it must.
        self._is_seen = self._detailed is None or self._at == self._detailed
        if self._is_seen and (self._is_first or self._at in self._looked_at):
            self._write("components", states=dict(component_states(self._m)))
        self._is_first = False
        if self._at == self._kill_before:
            self._m.commits.wait()
            self._file.flush()
            if self._m.processes.is_rank_zero:
                os.kill(os.getpid(), signal.SIGKILL)
        if self._last is not None and self._at >= self._last:
            self._m.stop_requests.reason = "the last step to retrace"

    def batch_is_loaded(self, position: int, ref: BatchRef, batch: Any) -> None:
        if not self._is_seen:
            return
        planned = self._m.runners[0].points(self._at[0]).batch(ref)
        facts = {"dataset": ref.shape.dataset, "points": list(planned.indices), "rank": self._m.processes.rank}
        self._write("batch", position=position, digest=fingerprint(batch), **facts)
        if self._at == self._detailed:
            # The module transform may edit the batch in place.
            self._kept[str(position)] = {**facts, "batch": _copied(batch)}

    def losses_are_known(self, position: int, losses: dict[str, torch.Tensor]) -> None:
        if not self._is_seen:
            return
        means = {name: float(loss.detach().double().mean()) for name, loss in losses.items()}
        digests = {name: fingerprint(loss) for name, loss in losses.items()}
        self._write("losses", position=position, means=means, digests=digests)
        if self._at == self._detailed:
            self._kept[str(position)]["losses"] = {name: loss.detach().cpu() for name, loss in losses.items()}

    def step_ends(self, outcome: StepOutcome) -> None:
        if not self._is_seen:
            return
        experiment = self._m.experiment
        weighter = experiment.components.loss_weighter
        self._write(
            "step",
            skipped=outcome.skipped,
            norms=outcome.norms,
            rates=experiment.learning_rates(),
            loss_weights={name: float(weighter.get_loss_weight(name)) for name in experiment.settings.register_names},
            modules={name: fingerprint(one.state_dict()) for name, one in experiment.components.all_modules.items()},
            optimizers={name: fingerprint(one.state_dict()) for name, one in experiment.optimizers.items()},
        )
        if self._at == self._detailed:
            torch.save(self._kept, self._folder / f"batches_{self._m.processes.rank}.pt")
        self._file.flush()

    def _write(self, kind: str, **facts: Any) -> None:
        epoch, step = self._at
        ref = {"epoch": epoch, "step": step, "rank": self._m.processes.rank}
        self._file.write(json.dumps({"kind": kind, **ref, **facts}) + "\n")


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: _copied(child) for key, child in value.items()}
    return [_copied(child) for child in value] if isinstance(value, (list, tuple)) else value


def component_states(session: TrainingSession) -> Iterator[tuple[str, str]]:
    """Yield every attribute that an author's own component holds, by the name of its file."""
    components = session.experiment.components
    owners: dict[str, Any] = {f"datasets/{name}.py": one for name, one in components.datasets.items()}
    owners |= {f"data_transforms/{name}.py": one.train for name, one in components.data_transforms.items()}
    owners |= {f"module_transforms/{name}.py": one for name, one in session.module_transforms.items()}
    owners |= {f"data_counters/{name}.py": one.counter for name, one in components.data_counters.items()}
    owners |= {f"optim_sched/{name}.py": one for name, one in session.experiment.schedulers.items()}
    for name in ("loss_weighter", "early_stopper", "checkpoint_saver"):
        owners[f"{name}.py"] = getattr(components, name)
    authored = {file: one for file, one in owners.items() if not type(one).__module__.startswith("pipeline.")}
    for file, owner in authored.items():
        yield from ((f"{file}: {path}", shown) for path, shown in _attributes(owner, type(owner).__name__, 0))
    for name, module in components.all_modules.items():
        for path, shown in _module_attributes(module):
            yield f"modules/{name}.py: {path}", shown
    yield from _globals()


def _attributes(owner: Any, path: str, depth: int) -> Iterator[tuple[str, str]]:
    for name, value in sorted(getattr(owner, "__dict__", {}).items()):
        where = f"{path}.{name}"
        is_plain = not hasattr(value, "__dict__") or isinstance(value, (torch.Tensor, torch.Generator))
        if is_plain:
            yield where, _shown(value)
        elif depth < _DEEPEST and not isinstance(value, _FOREIGN) and not callable(value):
            yield from _attributes(value, where, depth + 1)


def _module_attributes(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield what a module keeps besides parameters and buffers, which a commit does not hold."""
    for path, layer in module.named_modules():
        for name, value in sorted(vars(layer).items()):
            if not name.startswith("_") and name != "training" and not hasattr(value, "__dict__"):
                yield f"{path or type(layer).__name__}.{name}", _shown(value)


def _globals() -> Iterator[tuple[str, str]]:
    """Yield the variables of the pymodules themselves that can have a history."""
    for name, module in sorted(sys.modules.items()):
        if name.startswith("_experiment_pymodules_"):
            file = "/".join(name.split(".")[1:]) + ".py"
            for variable, value in sorted(vars(module).items()):
                if not variable.startswith("__") and _has_history(value):
                    yield f"{file}: {variable}", _shown(value)


def _has_history(value: Any) -> bool:
    plain = (int, float, str, list, dict, set, tuple, itertools.count)
    return isinstance(value, plain) or "andom" in type(value).__name__ or type(value).__name__ == "Generator"


def _shown(value: Any) -> str:
    """Return something to compare and to show: a short value itself, else its type and fingerprint."""
    if isinstance(value, (bool, int, float, str, type(None), itertools.count)) and len(repr(value)) < 40:
        return repr(value)
    return f"{type(value).__name__} {fingerprint(value)[:8]}"


@contextlib.contextmanager
def scratch_home(paths: ExperimentPaths, settings: Path, parent: str | None) -> Iterator[ExperimentPaths]:
    """Yield a data home of its own for a copy of an experiment, with links to the weights it may start from."""
    with tempfile.TemporaryDirectory(prefix="retrace_", dir=parent) as name:
        scratch = ExperimentPaths(Path(name), paths.name)
        for part in ("pymodules", "settings"):
            shutil.copytree(settings / part, scratch.settings / part)
        if paths.module_ckps.is_dir():
            scratch.module_ckps.symlink_to(paths.module_ckps)
        for other in results_names(paths.home):
            if other != paths.name:
                link = scratch.other(other).results
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(paths.other(other).results)
        yield scratch


def retrace(
    scratch: ExperimentPaths,
    nproc: int,
    words: list[str],
    plan: dict[str, Any],
    variables: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run an experiment in its scratch folder under observation, with variables added to the environment."""
    folder = scratch.home / plan["name"]
    folder.mkdir(exist_ok=True)
    plan = {"kill_before": None, "look_at": [], "detail": None, **plan, "folder": str(folder)}
    (folder / "plan.json").write_text(json.dumps(plan))
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={nproc}"] if nproc > 1 else []
    module = ["-m", "pipeline.tracing.retrace", str(folder / "plan.json")]
    where = [scratch.name, "--data-home", str(scratch.home)]
    search = filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])
    return subprocess.run(
        [sys.executable, *launcher, *module, *where, *words],
        env={**os.environ, **(variables or {}), "PYTHONPATH": os.pathsep.join(search)},
        capture_output=True,
        text=True,
        check=False,
    )


def read_trace(scratch: ExperimentPaths, name: str) -> list[dict[str, Any]]:
    """Return all that the ranks of a retraced run have written, in the order of steps and batches."""
    files = sorted((scratch.home / name).glob("rank_*.jsonl"))
    lines = [line for file in files for line in file.read_text().splitlines()]
    return sorted(map(json.loads, lines), key=lambda one: (one["epoch"], one["step"], one.get("position", -1)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    known, words = parser.parse_known_args()
    plan = json.loads(known.plan.read_text())
    rank = os.environ.get("RANK", "0")
    with (Path(plan["folder"]) / f"rank_{rank}.jsonl").open("w") as file:

        def watch(session: TrainingSession) -> None:
            session.training.observer = Recorder(session, file, plan)

        return run_worker(parse_arguments(words), watch)


if __name__ == "__main__":
    exit_now(main())
