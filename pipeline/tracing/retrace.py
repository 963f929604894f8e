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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from logging import Logger
from pathlib import Path
from typing import Any, TextIO, TypedDict

import torch
from torch import nn
from torch.optim import Optimizer

from pipeline.arguments import parse_arguments
from pipeline.components.position import reads_position
from pipeline.paths import RESULTS_HOME_VARIABLE, ExperimentPaths, results_names
from pipeline.serialization.fingerprint import fingerprint
from pipeline.session import TrainingSession
from pipeline.training.step import StepObserver, StepOutcome
from pipeline.training.step_plan import BatchRef
from pipeline.worker import exit_now, run_worker

# Epoch and step, both counted from 1.
Step = tuple[int, int]
# A step as it is asked for: its number in the whole experiment, or its epoch and its number there.
AskedStep = int | Sequence[int]
_MAX_DEPTH = 3
_MAX_SHOWN_CHARACTERS = 40
# Objects that are not part of a component's own state, or whose state is compared elsewhere.
_NOT_ENTERED = (nn.Module, Optimizer, Logger, type)


@dataclass(frozen=True)
class Plan:
    """What an observed run records and when it ends; handed to its processes as a JSON file."""

    name: str
    # The run stops after this step, or is killed before that one.
    last: AskedStep | None = None
    kill_before: AskedStep | None = None
    # Steps before which the state of the author's components is recorded, besides the first one of a life.
    look_at: Sequence[AskedStep] = ()
    # The only step that is recorded, then with its batches and losses per item.
    detail: AskedStep | None = None

    def folder(self, scratch: ExperimentPaths) -> Path:
        return scratch.home / self.name


class Event(TypedDict, total=False):
    """One line that a rank has recorded; which keys are there depends on the kind."""

    kind: str
    epoch: int
    step: int
    rank: int
    # Of a batch and of its losses: its position in the step.
    position: int
    # Of a batch.
    dataset: str
    points: list[int]
    digest: str
    # Of losses, by register.
    means: dict[str, float]
    digests: dict[str, str]
    # Of components, by file and attribute.
    states: dict[str, str]
    # Of a step that has ended.
    skipped: bool
    norms: dict[str, float]
    rates: dict[str, dict[str, float]]
    loss_weights: dict[str, float]
    modules: dict[str, str]
    optimizers: dict[str, str]


class Recorder(StepObserver):
    """Writes down, as JSON lines, what a rank sees; may end the run after a step, or kill it before one."""

    def __init__(self, session: TrainingSession, file: TextIO, plan: Plan, folder: Path) -> None:
        self._session = session
        self._file = file
        self._folder = folder
        self._last = self._resolve(plan.last)
        self._kill_before = self._resolve(plan.kill_before)
        self._looked_at = {self._resolve(step) for step in plan.look_at}
        self._detailed = self._resolve(plan.detail)
        self._is_first = True
        self._is_recorded = True
        self._at: Step = (0, 0)
        self._kept: dict[str, dict[str, object]] = {}

    def _resolve(self, asked: AskedStep | None) -> Step | None:
        """Return epoch and step of a step that may be given by its number in the whole experiment."""
        if isinstance(asked, int):
            epoch, index = divmod(asked - 1, self._session.training.plan.num_steps)
            return epoch + 1, index + 1
        return (asked[0], asked[1]) if asked else None

    def step_begins(self, epoch: int, step: int) -> None:
        self._at = (epoch, step)
        # Fingerprints take time: where one step alone is wanted, the steps before it are not recorded.
        self._is_recorded = self._detailed is None or self._at == self._detailed
        if self._is_recorded and (self._is_first or self._at in self._looked_at):
            self._write("components", states=dict(component_states(self._session)))
        self._is_first = False
        if self._at == self._kill_before:
            # The commit of the step before must be complete, so that it is known from where the next life continues.
            self._session.commits.wait()
            self._file.flush()
            # One rank is enough: torchrun, or the loss of a peer, ends the others.
            if self._session.processes.is_rank_zero:
                os.kill(os.getpid(), signal.SIGKILL)
        if self._last is not None and self._at >= self._last:
            self._session.stop_requests.reason = "the last step to retrace"

    def batch_is_loaded(self, position: int, ref: BatchRef, batch: Any) -> None:
        if not self._is_recorded:
            return
        planned = self._session.runners[0].points(self._at[0]).batch(ref)
        facts = {"dataset": ref.shape.dataset, "points": list(planned.indices), "rank": self._session.processes.rank}
        self._write("batch", position=position, digest=fingerprint(batch), **facts)
        if self._at == self._detailed:
            # The module transform may edit the batch in place.
            self._kept[str(position)] = {**facts, "batch": _copy_to_cpu(batch)}

    def losses_are_known(self, position: int, losses: dict[str, torch.Tensor]) -> None:
        if not self._is_recorded:
            return
        means = {name: float(loss.detach().double().mean()) for name, loss in losses.items()}
        digests = {name: fingerprint(loss) for name, loss in losses.items()}
        self._write("losses", position=position, means=means, digests=digests)
        if self._at == self._detailed:
            self._kept[str(position)]["losses"] = {name: loss.detach().cpu() for name, loss in losses.items()}

    def step_ends(self, outcome: StepOutcome) -> None:
        if not self._is_recorded:
            return
        experiment = self._session.experiment
        weighter = experiment.components.loss_weighter
        modules = experiment.components.all_modules.items()
        optimizers = experiment.optimizers.items()
        self._write(
            "step",
            skipped=outcome.skipped,
            norms=outcome.norms,
            rates=experiment.learning_rates(),
            loss_weights={name: float(weighter.get_loss_weight(name)) for name in experiment.settings.register_names},
            modules={name: fingerprint(module.state_dict()) for name, module in modules},
            optimizers={name: fingerprint(optimizer.state_dict()) for name, optimizer in optimizers},
        )
        if self._at == self._detailed:
            torch.save(self._kept, self._folder / f"batches_{self._session.processes.rank}.pt")
        # After every step, because a killed process writes nothing at its end.
        self._file.flush()

    def _write(self, kind: str, **facts: object) -> None:
        epoch, step = self._at
        where = {"epoch": epoch, "step": step, "rank": self._session.processes.rank}
        self._file.write(json.dumps({"kind": kind, **where, **facts}) + "\n")


def _copy_to_cpu(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: _copy_to_cpu(child) for key, child in value.items()}
    return [_copy_to_cpu(child) for child in value] if isinstance(value, (list, tuple)) else value


def component_states(session: TrainingSession) -> Iterator[tuple[str, str]]:
    """Yield every attribute that an author's own component holds, by the name of its file."""
    components = session.experiment.components
    transforms = components.data_transforms.items()
    owners: dict[str, object] = {f"datasets/{name}.py": dataset for name, dataset in components.datasets.items()}
    owners |= {f"data_transforms/{name}.py": transform.train for name, transform in transforms}
    owners |= {
        f"module_transforms/{name}.py": transform for name, transform in session.experiment.module_transforms.items()
    }
    owners |= {f"data_counters/{name}.py": entry.counter for name, entry in components.data_counters.items()}
    owners |= {f"optim_sched/{name}.py": scheduler for name, scheduler in session.experiment.schedulers.items()}
    owners |= {f"hooks/{name}.py": hook for name, hook in components.hooks.items()}
    for name in ("loss_weighter", "early_stopper", "checkpoint_saver"):
        owners[f"{name}.py"] = getattr(components, name)
    for file, owner in owners.items():
        # Our own ready components save all they hold.
        if not type(owner).__module__.startswith("pipeline."):
            yield from ((f"{file}: {path}", shown) for path, shown in _attributes(owner, type(owner).__name__, 0))
    for name, module in components.all_modules.items():
        yield from ((f"modules/{name}.py: {path}", shown) for path, shown in _module_attributes(module))
    yield from _global_variables()


def _attributes(owner: object, path: str, depth: int) -> Iterator[tuple[str, str]]:
    for name, value in sorted(getattr(owner, "__dict__", {}).items()):
        if name == "position" and reads_position(owner):
            # It is set again before each batch.
            continue
        where = f"{path}.{name}"
        is_plain = not hasattr(value, "__dict__") or isinstance(value, (torch.Tensor, torch.Generator))
        if is_plain:
            yield where, _describe(value)
        elif depth < _MAX_DEPTH and not isinstance(value, _NOT_ENTERED) and not callable(value):
            yield from _attributes(value, where, depth + 1)


def _module_attributes(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield what a module keeps besides parameters and buffers, which a commit does not hold."""
    for path, layer in module.named_modules():
        for name, value in sorted(vars(layer).items()):
            if not name.startswith("_") and name != "training" and not hasattr(value, "__dict__"):
                yield f"{path or type(layer).__name__}.{name}", _describe(value)


def _global_variables() -> Iterator[tuple[str, str]]:
    """Yield the variables of the pymodules themselves that can have a history."""
    kinds = (int, float, str, list, dict, set, tuple, itertools.count)
    for name, module in sorted(sys.modules.items()):
        if not name.startswith("_experiment_pymodules_"):
            continue
        file = "/".join(name.split(".")[1:]) + ".py"
        for variable, value in sorted(vars(module).items()):
            # Generators of random numbers are recognised by name: python's, numpy's and torch's have no common class.
            kind = type(value).__name__
            has_history = isinstance(value, kinds) or "andom" in kind or kind == "Generator"
            if not variable.startswith("__") and has_history:
                yield f"{file}: {variable}", _describe(value)


def _describe(value: object) -> str:
    """Return something to compare and to show: a short value itself, else its type and fingerprint."""
    plain = (bool, int, float, str, type(None), itertools.count)
    if isinstance(value, plain) and len(repr(value)) < _MAX_SHOWN_CHARACTERS:
        return repr(value)
    return f"{type(value).__name__} {fingerprint(value)[:8]}"


@contextlib.contextmanager
def scratch_home(paths: ExperimentPaths, settings: Path, parent: str | None) -> Iterator[ExperimentPaths]:
    """Yield a data home of its own for a copy of an experiment, with links to the weights it may start from."""
    with tempfile.TemporaryDirectory(prefix="retrace_", dir=parent) as name:
        scratch = ExperimentPaths(Path(name), paths.name, results_home=Path(name))
        for part in ("pymodules", "settings"):
            shutil.copytree(settings / part, scratch.settings / part)
        if paths.module_ckps.is_dir():
            scratch.module_ckps.symlink_to(paths.module_ckps)
        for other in results_names(paths.home):
            # The results of the experiment itself are not linked: the copy writes its own there.
            if other != paths.name:
                link = scratch.other(other).results
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(paths.other(other).results)
        yield scratch


def retrace(
    scratch: ExperimentPaths,
    nproc: int,
    words: list[str],
    plan: Plan,
    variables: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run an experiment in its scratch folder under observation, with variables added to the environment."""
    folder = plan.folder(scratch)
    folder.mkdir(exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(asdict(plan)))
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={nproc}"] if nproc > 1 else []
    module = ["-m", "pipeline.tracing.retrace", str(folder / "plan.json")]
    where = [scratch.name, "--data-home", str(scratch.home)]
    # This very pipeline, also from a checkout that is not installed.
    search_path = filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])
    return subprocess.run(
        [sys.executable, *launcher, *module, *where, *words],
        # A copy writes nowhere but into its scratch folder.
        env={
            **os.environ,
            **(variables or {}),
            "PYTHONPATH": os.pathsep.join(search_path),
            RESULTS_HOME_VARIABLE: "",
        },
        capture_output=True,
        text=True,
        check=False,
    )


def read_trace(scratch: ExperimentPaths, name: str) -> list[Event]:
    """Return all that the ranks of a retraced run have written, in the order of steps and batches."""
    events: list[Event] = []
    for file in sorted((scratch.home / name).glob("rank_*.jsonl")):
        events += map(json.loads, file.read_text().splitlines())
    events.sort(key=_order)
    return events


def _order(event: Event) -> tuple[int, int, int]:
    return event["epoch"], event["step"], event.get("position", -1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    known, words = parser.parse_known_args()
    folder = known.plan.parent
    plan = Plan(**json.loads(known.plan.read_text()))
    rank = os.environ.get("RANK", "0")
    with (folder / f"rank_{rank}.jsonl").open("w") as file:

        def observe(session: TrainingSession) -> None:
            session.training.observer = Recorder(session, file, plan, folder)

        return run_worker(parse_arguments(words), observe)


if __name__ == "__main__":
    exit_now(main())
