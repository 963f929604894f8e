"""Prove on your own experiment that a killed and resumed run gives the same bits, with any number of processes.

In a scratch folder the experiment runs a few steps without interruption, and once more with kills in between. Every
loaded batch, loss, weight and committed file of the two is compared. With several numbers of processes, each of them
also runs without interruption, and every resume changes the number.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from pipeline.errors import PipelineError, UsageError
from pipeline.experiment.settings.settings import FSDP, parse_settings, read_contents
from pipeline.lifecycle.mode import unknown_experiment
from pipeline.paths import ExperimentPaths, data_home, settings_names
from pipeline.store.compare import first_difference
from pipeline.tracing.retrace import read_trace, retrace, scratch_home

EXAMPLE = """\
examples:
  python -m pipeline verify-resume digits --nproc 2 --steps 12
  python -m pipeline verify-resume digits --nproc 1,2,3 \\
    --set training.gradient_reduction=exact"""
_QUIET = ("training.checkpoint_every_steps=1", "logging.tensorboard.enabled=false")
_ADVICE = (
    "draw from the generators of python, numpy and torch, which are seeded for every batch, instead of one of your "
    "own; let save and load of a component carry all it remembers; sort sets and listings"
)
_ADVICE_FOR_SEVERAL = "; let nothing depend on the rank, on the number of processes or on earlier batches of a process"
Key = tuple[str, int, int, int]
Trace = dict[Key, dict[str, Any]]


@dataclass(frozen=True)
class Comparison:
    """What a run has otherwise than the reference: the first difference, and state that was lost at a resume."""

    difference: str | None
    lost: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", metavar="EXP", help="an experiment with a settings folder; it is not touched")
    parser.add_argument(
        "--nproc",
        type=_parse_world_sizes,
        default=(1,),
        metavar="N,...",
        help="number of processes (default: 1); with several, such as 1,2,3, also prove that the number changes no bit",
    )
    parser.add_argument("--steps", type=int, default=9, metavar="N", help="steps to run (default: 9)")
    parser.add_argument("--kills", type=int, default=2, metavar="K", help="kills, evenly spread (default: 2)")
    parser.add_argument("--set", action="append", default=[], metavar="FILE.KEY=VALUE", help="change a setting")
    parser.add_argument("--scratch", metavar="DIR", help="where to work (default: the system's temporary folder)")


def _parse_world_sizes(word: str) -> tuple[int, ...]:
    """Return the numbers of processes, or let the parser refuse them."""
    try:
        world_sizes = tuple(int(number) for number in word.split(","))
    except ValueError:
        world_sizes = ()
    if min(world_sizes, default=0) < 1 or len(set(world_sizes)) < len(world_sizes):
        raise argparse.ArgumentTypeError(
            f"must be a number from 1 on, or several different ones such as 1,2,3, but is {word!r} instead"
        )
    return world_sizes


def execute(arguments: argparse.Namespace) -> int:
    paths = ExperimentPaths(data_home(arguments.data_home), arguments.experiment)
    if not (paths.settings / "pymodules").is_dir():
        raise unknown_experiment(paths, settings_names(paths.home))
    if not 0 < arguments.kills < arguments.steps:
        raise UsageError("--steps must exceed --kills, and all numbers must be at least 1.")
    world_sizes: tuple[int, ...] = arguments.nproc
    if len(world_sizes) > 1:
        _refuse_without_exact(paths, arguments)
    with ExitStack() as stack:
        homes = [
            stack.enter_context(scratch_home(paths, paths.settings, arguments.scratch))
            for _ in range(len(world_sizes) + 1)
        ]
        reference, *others, killed = homes
        _run_uninterrupted(reference, arguments, world_sizes[0])
        for nproc, scratch in zip(world_sizes[1:], others, strict=True):
            _run_uninterrupted(scratch, arguments, nproc)
            found = _compare(reference, scratch, [nproc], arguments)
            if found.difference:
                return _report_difference(found, arguments)
        lives = _run_killed(killed, arguments)
        found = _compare(reference, killed, lives, arguments)
        if found.difference:
            return _report_difference(found, arguments)
        num_batches = sum(key[0] == "batch" for key in _by_place(read_trace(reference, "life_0")))
    proved = "their losses, all weights and every committed file have the same bits"
    print(f"exact: {num_batches} batches, {proved}{_describe_proof(world_sizes, lives)}")
    for line in found.lost:
        print(f"  note: {line}")
    return 0


def _refuse_without_exact(paths: ExperimentPaths, arguments: argparse.Namespace) -> None:
    """Refuse several numbers of processes where results are promised to be equal up to rounding only."""
    training = parse_settings(read_contents(paths.settings / "settings", tuple(arguments.set))).training
    if training.gradient_reduction == "exact":
        return
    changes = ["training.gradient_reduction=exact"]
    # Both are refused together with exact, so the line below would not run without these.
    if training.parallelism == FSDP:
        changes.append("training.parallelism=ddp")
    if training.sync_batchnorm:
        changes.append("training.sync_batchnorm=false")
    options: dict[str, str | None] = {
        "--nproc": ",".join(map(str, arguments.nproc)),
        "--steps": str(arguments.steps),
        "--kills": str(arguments.kills),
        "--scratch": arguments.scratch,
        "--data-home": arguments.data_home,
    }
    words = [word for name, value in options.items() if value is not None for word in (name, value)]
    words += [word for change in (*arguments.set, *changes) for word in ("--set", change)]
    raise UsageError(
        'Several numbers of processes give the same bits only with gradient_reduction: "exact", but the settings of '
        f'{paths.name!r} have "{training.gradient_reduction}".',
        shlex.join(["python", "-m", "pipeline", "verify-resume", paths.name, *words]),
    )


def _kill_steps(arguments: argparse.Namespace) -> list[int]:
    return [1 + arguments.steps * (number + 1) // (arguments.kills + 1) for number in range(arguments.kills)]


def _run_uninterrupted(scratch: ExperimentPaths, arguments: argparse.Namespace, nproc: int) -> None:
    print(f"{scratch.name}: {arguments.steps} steps without interruption{_suffix(arguments, nproc)} …", flush=True)
    plan = {"name": "life_0", "last": arguments.steps, "look_at": _kill_steps(arguments)}
    _run(scratch, arguments, nproc, plan)


def _run_killed(scratch: ExperimentPaths, arguments: argparse.Namespace) -> list[int]:
    """Run with a kill between lives, each with the next number of processes, and return the number of each life."""
    lives = [arguments.nproc[number % len(arguments.nproc)] for number in range(arguments.kills + 1)]
    for number, (nproc, kill) in enumerate(zip(lives, [*_kill_steps(arguments), None], strict=True)):
        event = f"killed before step {kill}" if kill else "resumed to the end"
        print(f"{scratch.name}: {event}{_suffix(arguments, nproc)} …", flush=True)
        plan = {"name": f"life_{number}", "last": None if kill else arguments.steps, "kill_before": kill}
        _run(scratch, arguments, nproc, plan)
    return lives


def _suffix(arguments: argparse.Namespace, nproc: int) -> str:
    return f" with {_describe([nproc])}" if len(arguments.nproc) > 1 else ""


def _run(scratch: ExperimentPaths, arguments: argparse.Namespace, nproc: int, plan: dict[str, Any]) -> None:
    """Run one life; raise unless it ends as planned."""
    is_resumed = plan["name"] != "life_0"
    overrides = [word for one in (*_QUIET, *arguments.set) for word in ("--set", one)]
    words = ["--resume"] if is_resumed else overrides
    # Bits depend on the threads of a process. torchrun gives each of several one thread, and a single one gets all.
    variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or "1"} if len(arguments.nproc) > 1 else {}
    done = retrace(scratch, nproc, words, plan, variables)
    if done.returncode != 0 and plan.get("kill_before") is None:
        resumed = "A resumed run" if is_resumed else "The run"
        line = shlex.join(map(str, done.args))
        raise PipelineError(f"{resumed} failed, so there is nothing to compare:\n{done.stderr.strip()}\n  line: {line}")
    # torchrun turns the signal that ended a process into 1.
    if plan.get("kill_before") is not None and done.returncode != (1 if nproc > 1 else -signal.SIGKILL):
        raise PipelineError(f"The run ended before it could be killed:\n{done.stderr.strip()}")


def _compare(
    reference: ExperimentPaths, scratch: ExperimentPaths, lives: list[int], arguments: argparse.Namespace
) -> Comparison:
    """Compare a run with the reference; ``lives`` are the numbers of processes of its starts."""
    expected = _by_place(read_trace(reference, "life_0"))
    found: Trace = {}
    world_sizes: dict[Key, int] = {}
    lost = list[str]()
    for number, nproc in enumerate(lives):
        life = _by_place(read_trace(scratch, f"life_{number}"))
        lost += _unrestored(expected, life) if number else []
        found |= life
        world_sizes |= dict.fromkeys(life, nproc)
    lost = list(dict.fromkeys(lost))
    key, difference = next(_differences(expected, found), (None, None))
    if difference is None:
        committed = first_difference(reference.data, scratch.data)
        difference = committed and f"data/{committed}"
    if difference and len(arguments.nproc) > 1:
        # What no life has, and committed files, are the work of all lives.
        responsible = lives if key is None or key not in world_sizes else [world_sizes[key]]
        difference = f"with {_describe(responsible)}, {difference}"
    return Comparison(difference, lost)


def _report_difference(found: Comparison, arguments: argparse.Namespace) -> int:
    print("NOT exact.")
    print(f"  first difference: {found.difference}")
    for line in found.lost:
        print(f"  suspect: {line}")
    print(f"  fix: {_ADVICE}{_ADVICE_FOR_SEVERAL if len(arguments.nproc) > 1 else ''}")
    return 1


def _describe(world_sizes: Sequence[int]) -> str:
    """Return numbers of processes in words, such as '1, 2 and 3 processes'."""
    *others, last = (str(nproc) for nproc in dict.fromkeys(world_sizes))
    listed = f"{', '.join(others)} and {last}" if others else last
    return "1 process" if listed == "1" else f"{listed} processes"


def _describe_proof(world_sizes: Sequence[int], lives: Sequence[int]) -> str:
    """Return with which numbers of processes the bits are the same; few kills do not reach all of them."""
    if len(world_sizes) == 1:
        return ""
    if set(lives) == set(world_sizes):
        return f" with {_describe(world_sizes)}, uninterrupted and killed"
    return f" with {_describe(world_sizes)} uninterrupted, and with {_describe(lives)} killed"


def _by_place(trace: list[dict[str, Any]]) -> Trace:
    """Key what was seen by kind, epoch, step, and batch or rank; what was done twice counts as it was done last."""
    return {(one["kind"], one["epoch"], one["step"], one.get("position", one["rank"])): one for one in trace}


def _unrestored(expected: Trace, life: Trace) -> Iterator[str]:
    """Yield what a component remembered before a kill and does not after the resume."""
    for key, one in life.items():
        before = expected.get(key)
        if key[0] != "components" or before is None:
            continue
        for name, shown in before["states"].items():
            if one["states"].get(name) != shown:
                yield f"pymodules/{name} was {shown} before the kill and is {one['states'].get(name)} after the resume"


def _differences(expected: Trace, found: Trace) -> Iterator[tuple[Key, str]]:
    """Yield differences in the order in which they arise: batch, losses, then what the step made of them."""
    order = {"batch": 0, "losses": 1, "step": 2}
    keys = [key for key in {**expected, **found} if key[0] in order]
    for key in sorted(keys, key=lambda key: (*key[1:3], order[key[0]], key[3])):
        for sentence in _differences_at(key, expected, found):
            yield key, sentence


def _differences_at(key: Key, expected: Trace, found: Trace) -> Iterator[str]:
    kind, epoch, step, position = key
    where = f"epoch {epoch}, step {step}"
    # A rank that the other run does not have must end its steps as rank 0 does.
    one = expected.get(key) or (expected.get((kind, epoch, step, 0)) if kind == "step" else None)
    other = found.get(key) or (found.get((kind, epoch, step, 0)) if kind == "step" else None)
    if one is None:
        yield f"{where}: the uninterrupted run does not have it"
    elif other is None:
        yield f"{where}: the compared run does not have it"
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
