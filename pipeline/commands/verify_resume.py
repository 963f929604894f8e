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
from contextlib import ExitStack

from pipeline.arguments import add_set_option, set_flags
from pipeline.command_lines import verb_line
from pipeline.errors import PipelineError, UsageError
from pipeline.experiment.settings.settings import parse_settings, read_contents
from pipeline.lifecycle.mode import unknown_experiment
from pipeline.paths import ExperimentPaths, data_home, settings_names
from pipeline.tracing.comparison import Comparison, compare_runs, count_batches, describe_world_sizes, life_name
from pipeline.tracing.retrace import Plan, retrace, scratch_home

EXAMPLE = """\
examples:
  training-pipeline verify-resume digits --nproc 2 --steps 12
  training-pipeline verify-resume digits --nproc 1,2,3 \\
    --set training.gradient_reduction=exact"""
# With a commit at every step, each kill is followed by a resume from the step before it.
_OVERRIDES = ("training.checkpoint_every_steps=1", "logging.tensorboard.enabled=false")
_ADVICE = (
    "draw from the generators of python, numpy and torch, which are seeded for every batch, instead of one of your "
    "own; let save and load of a component carry all it remembers; sort sets and listings"
)
_ADVICE_FOR_SEVERAL = "; let nothing depend on the rank, on the number of processes or on earlier batches of a process"


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
    add_set_option(parser)
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
    varies_processes = len(world_sizes) > 1
    if varies_processes:
        _refuse_without_exact(paths, arguments)
    with ExitStack() as stack:
        reference, *others, killed = [
            stack.enter_context(scratch_home(paths, paths.settings, arguments.scratch))
            for _ in range(len(world_sizes) + 1)
        ]
        _run_uninterrupted(reference, arguments, world_sizes[0])
        for nproc, scratch in zip(world_sizes[1:], others, strict=True):
            _run_uninterrupted(scratch, arguments, nproc)
            # Compared at once: if this number of processes already gives other bits, more runs are useless.
            comparison = compare_runs(reference, scratch, [nproc], names_processes=varies_processes)
            if comparison.difference:
                return _report_difference(comparison, varies_processes)
        lives = _run_killed(killed, arguments)
        comparison = compare_runs(reference, killed, lives, names_processes=varies_processes)
        if comparison.difference:
            return _report_difference(comparison, varies_processes)
        num_batches = count_batches(reference)
    proof = "their losses, all weights and every committed file have the same bits"
    if varies_processes and set(lives) == set(world_sizes):
        proof += f" with {describe_world_sizes(world_sizes)}, uninterrupted and killed"
    elif varies_processes:
        # Few kills do not reach all numbers of processes, and only what was run is claimed.
        proof += (
            f" with {describe_world_sizes(world_sizes)} uninterrupted, and with {describe_world_sizes(lives)} killed"
        )
    print(f"exact: {num_batches} batches, {proof}")
    for line in comparison.lost:
        print(f"  note: {line}")
    return 0


def _refuse_without_exact(paths: ExperimentPaths, arguments: argparse.Namespace) -> None:
    """Refuse several numbers of processes where results are promised to be equal up to rounding only."""
    training = parse_settings(read_contents(paths.settings / "settings", tuple(arguments.set))).training
    if training.is_exact:
        return
    changes = ["training.gradient_reduction=exact"]
    # Both are refused together with exact, so without these the printed line would not run.
    if training.shards_modules:
        changes.append("training.parallelism=ddp")
    if training.sync_batchnorm:
        changes.append("training.sync_batchnorm=false")
    options: dict[str, str | None] = {
        "--nproc": ",".join(map(str, arguments.nproc)),
        "--steps": str(arguments.steps),
        "--kills": str(arguments.kills),
        "--scratch": arguments.scratch,
    }
    words = [word for name, value in options.items() if value is not None for word in (name, value)]
    words += set_flags((*arguments.set, *changes))
    raise UsageError(
        'Several numbers of processes give the same bits only with gradient_reduction: "exact", but the settings of '
        f'{paths.name!r} have "{training.gradient_reduction}".',
        verb_line("verify-resume", paths.name, paths.home, *words),
    )


def _kill_steps(arguments: argparse.Namespace) -> list[int]:
    """Return the steps before which a run is killed, evenly spread."""
    return [1 + arguments.steps * (number + 1) // (arguments.kills + 1) for number in range(arguments.kills)]


def _run_uninterrupted(scratch: ExperimentPaths, arguments: argparse.Namespace, nproc: int) -> None:
    print(f"{scratch.name}: {arguments.steps} steps without interruption{_suffix(arguments, nproc)} …", flush=True)
    # The state of components is recorded where the other run is killed, to be compared with that after its resume.
    plan = Plan(life_name(0), last=arguments.steps, look_at=_kill_steps(arguments))
    _run(scratch, arguments, nproc, plan)


def _run_killed(scratch: ExperimentPaths, arguments: argparse.Namespace) -> list[int]:
    """Run with a kill between lives, each with the next number of processes, and return the number of each life."""
    lives = [arguments.nproc[number % len(arguments.nproc)] for number in range(arguments.kills + 1)]
    for number, (nproc, kill) in enumerate(zip(lives, [*_kill_steps(arguments), None], strict=True)):
        event = f"killed before step {kill}" if kill else "resumed to the end"
        print(f"{scratch.name}: {event}{_suffix(arguments, nproc)} …", flush=True)
        plan = Plan(life_name(number), last=None if kill else arguments.steps, kill_before=kill)
        _run(scratch, arguments, nproc, plan)
    return lives


def _suffix(arguments: argparse.Namespace, nproc: int) -> str:
    return f" with {describe_world_sizes([nproc])}" if len(arguments.nproc) > 1 else ""


def _run(scratch: ExperimentPaths, arguments: argparse.Namespace, nproc: int, plan: Plan) -> None:
    """Run one life; raise unless it ends as planned."""
    is_resumed = plan.name != life_name(0)
    # Overrides are frozen into the copy at the first start, and a resume refuses to change them.
    words = ["--resume"] if is_resumed else set_flags((*_OVERRIDES, *arguments.set))
    # Bits depend on the threads of a process. torchrun gives each of several one thread, and a single one gets all.
    variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or "1"} if len(arguments.nproc) > 1 else {}
    done = retrace(scratch, nproc, words, plan, variables)
    if plan.kill_before is None and done.returncode != 0:
        run = "A resumed run" if is_resumed else "The run"
        line = shlex.join(map(str, done.args))
        raise PipelineError(f"{run} failed, so there is nothing to compare:\n{done.stderr.strip()}\n  line: {line}")
    # torchrun turns the signal that ended a process into 1.
    if plan.kill_before is not None and done.returncode != (1 if nproc > 1 else -signal.SIGKILL):
        raise PipelineError(f"The run ended before it could be killed:\n{done.stderr.strip()}")


def _report_difference(comparison: Comparison, varies_processes: bool) -> int:
    print("NOT exact.")
    print(f"  first difference: {comparison.difference}")
    for line in comparison.lost:
        print(f"  suspect: {line}")
    print(f"  fix: {_ADVICE}{_ADVICE_FOR_SEVERAL if varies_processes else ''}")
    return 1
