"""Prove on your own experiment that a killed and resumed run gives the same bits.

In a scratch folder the experiment runs a few steps without interruption, and once more with kills in between. Every
loaded batch, loss, weight and committed file of the two is compared.
"""

from __future__ import annotations

import argparse
import shlex
import signal
from collections.abc import Iterator
from typing import Any

from pipeline.commands.retrace import read_trace, retrace, scratch_home
from pipeline.errors import PipelineError, UsageError
from pipeline.paths import ExperimentPaths, data_home, settings_names
from pipeline.results.comparison import first_difference
from pipeline.results.situation import unknown_experiment

EXAMPLE = "example:\n  python -m pipeline verify-resume digits --nproc 2 --steps 12"
_QUIET = ("training.checkpoint_every_steps=1", "logging.tensorboard.enabled=false")
_ADVICE = (
    "draw from the generators of python, numpy and torch, which are set anew for every batch, instead of one of your "
    "own; let save and load of a component carry all it remembers; sort sets and listings"
)
Trace = dict[tuple[Any, ...], dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", metavar="EXP", help="an experiment with a settings folder; it is not touched")
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="number of processes (default: 1)")
    parser.add_argument("--steps", type=int, default=9, metavar="N", help="steps to run (default: 9)")
    parser.add_argument("--kills", type=int, default=2, metavar="K", help="kills, evenly spread (default: 2)")
    parser.add_argument("--set", action="append", default=[], metavar="FILE.KEY=VALUE", help="change a setting")
    parser.add_argument("--scratch", metavar="DIR", help="where to work (default: the system's temporary folder)")


def execute(arguments: argparse.Namespace) -> int:
    paths = ExperimentPaths(data_home(arguments.data_home), arguments.experiment)
    if not (paths.settings / "pymodules").is_dir():
        raise unknown_experiment(paths, settings_names(paths.home))
    if not 0 < arguments.kills < arguments.steps or arguments.nproc < 1:
        raise UsageError("--steps must exceed --kills, and all numbers must be at least 1.")
    kills = [1 + arguments.steps * (number + 1) // (arguments.kills + 1) for number in range(arguments.kills)]
    with (
        scratch_home(paths, paths.settings, arguments.scratch) as reference,
        scratch_home(paths, paths.settings, arguments.scratch) as killed,
    ):
        print(f"{paths.name}: {arguments.steps} steps without interruption …", flush=True)
        _run(reference, arguments, [], {"name": "life_0", "last": arguments.steps, "look_at": kills})
        for number, kill in enumerate(kills):
            print(f"{paths.name}: killed before step {kill} …", flush=True)
            _run(killed, arguments, _resume(number), {"name": f"life_{number}", "last": None, "kill_before": kill})
        print(f"{paths.name}: resumed to the end …", flush=True)
        _run(killed, arguments, ["--resume"], {"name": f"life_{len(kills)}", "last": arguments.steps})
        return _judge(paths, reference, killed, len(kills) + 1)


def _resume(number: int) -> list[str]:
    return ["--resume"] if number else []


def _run(scratch: ExperimentPaths, arguments: argparse.Namespace, words: list[str], plan: dict[str, Any]) -> None:
    """Run one life; anything but an end that was asked for is told."""
    overrides = [] if words else [word for one in (*_QUIET, *arguments.set) for word in ("--set", one)]
    done = retrace(scratch, arguments.nproc, [*words, *overrides], plan)
    if done.returncode != 0 and plan.get("kill_before") is None:
        resumed = "A resumed run" if words else "The run"
        line = shlex.join(map(str, done.args))
        raise PipelineError(f"{resumed} failed, so there is nothing to compare:\n{done.stderr.strip()}\n  line: {line}")
    # torchrun turns the signal that ended a process into 1.
    if plan.get("kill_before") is not None and done.returncode != (1 if arguments.nproc > 1 else -signal.SIGKILL):
        raise PipelineError(f"The run ended before it could be killed:\n{done.stderr.strip()}")


def _judge(paths: ExperimentPaths, reference: ExperimentPaths, killed: ExperimentPaths, num_lives: int) -> int:
    expected = _by_place(read_trace(reference, "life_0"))
    found: Trace = {}
    lost = list[str]()
    for number in range(num_lives):
        life = _by_place(read_trace(killed, f"life_{number}"))
        lost += _unrestored(expected, life) if number else []
        found |= life
    difference = next(_differences(expected, found), None)
    committed = first_difference(reference.data, killed.data)
    batches = sum(key[0] == "batch" for key in expected)
    if difference is None and committed is None:
        print(f"exact: {batches} batches, their losses, all weights and every committed file have the same bits")
        for line in dict.fromkeys(lost):
            print(f"  note: {line}")
        return 0
    print("NOT exact.")
    print(f"  first difference: {difference or f'data/{committed}'.replace(str(paths.home), '')}")
    for line in dict.fromkeys(lost):
        print(f"  suspect: {line}")
    print(f"  fix: {_ADVICE}")
    return 1


def _by_place(trace: list[dict[str, Any]]) -> Trace:
    """Key what was seen by kind, step and batch; a step that was done twice counts as it was done last."""
    return {(one["kind"], one["epoch"], one["step"], one.get("position", 0)): one for one in trace}


def _unrestored(expected: Trace, life: Trace) -> Iterator[str]:
    """Yield what a component remembered before a kill and does not after the resume."""
    for key, one in life.items():
        before = expected.get(key)
        if key[0] != "components" or before is None:
            continue
        for name, shown in before["states"].items():
            if one["states"].get(name) != shown:
                yield f"pymodules/{name} was {shown} before the kill and is {one['states'].get(name)} after the resume"


def _differences(expected: Trace, found: Trace) -> Iterator[str]:
    """Yield differences in the order in which they arise: batch, losses, then what the step made of them."""
    order = {"batch": 0, "losses": 1, "step": 2}
    for key in sorted((key for key in expected if key[0] in order), key=lambda key: (*key[1:3], order[key[0]], key[3])):
        kind, epoch, step, position = key
        where = f"epoch {epoch}, step {step}"
        one, other = expected[key], found.get(key)
        if other is None:
            yield f"{where}: the resumed run never saw it"
        elif kind == "batch":
            yield from _batch_differences(where, one, other)
        elif kind == "losses" and one["digests"] != other["digests"]:
            names = [name for name, digest in one["digests"].items() if other["digests"].get(name) != digest]
            dataset = expected["batch", epoch, step, position]["dataset"]
            yield (
                f"{where}: the losses {', '.join(names)} of a batch of {dataset!r} differ, though batch and weights "
                f"do not (look at module_transforms/{dataset}.py and the modules it uses)"
            )
        elif kind == "step":
            yield from _step_differences(where, one, other)


def _batch_differences(where: str, one: dict[str, Any], other: dict[str, Any]) -> Iterator[str]:
    dataset = one["dataset"]
    if one["points"] != other["points"]:
        yield f"{where}: a batch of {dataset!r} holds other points (look at get_split_idxs in datasets/{dataset}.py)"
    elif one["digest"] != other["digest"]:
        points = ", ".join(map(str, one["points"][:6]))
        yield (
            f"{where}: a loaded batch of {dataset!r} differs, points {points} … (look at datasets/{dataset}.py, "
            f"data_transforms/{dataset}.py and collate_fn in dataloaders/{dataset}.py)"
        )


def _step_differences(where: str, one: dict[str, Any], other: dict[str, Any]) -> Iterator[str]:
    culprits = {
        "rates": "learning rates after the step differ (look at the schedulers in optim_sched/)",
        "loss_weights": "loss weights after the step differ (look at loss_weighter.py)",
        "norms": "gradient norms differ, though the losses do not (look at the modules' backward passes)",
        "modules": "weights or buffers of {} differ after the step",
        "optimizers": "the state of optimizer {} differs after the step",
        "skipped": "one of the two skipped the step",
    }
    for name, sentence in culprits.items():
        if one[name] != other[name]:
            names = (
                [key for key, value in one[name].items() if other[name].get(key) != value] if "{}" in sentence else []
            )
            yield f"{where}: {sentence.format(', '.join(names))}"
