"""Start experiments in the background, in parallel or one after the other."""

from __future__ import annotations

import argparse
import shlex
from itertools import combinations, pairwise

from pipeline.arguments import add_set_option, set_flags
from pipeline.command_lines import LAUNCH_VARIABLE, verb_line
from pipeline.errors import StateConflict, UsageError, nearest
from pipeline.launch.refusals import refuse_invalid
from pipeline.launch.torchrun_command import ENTRY, TrainingLine, start_in_background, training_line
from pipeline.lifecycle.mode import check_known
from pipeline.monitoring.experiment_state import LIVE, state_of
from pipeline.paths import ExperimentPaths, data_home

EXAMPLE = """\
examples:
  training-pipeline launch digits:0-6 letters:7
  training-pipeline launch stage_1:0-3 then stage_2:0-3
  training-pipeline launch a b --set a:parameters.lr=1 --set b:parameters.lr=2"""
THEN = "then"
_DEFAULT_FLAGS = ["--auto"]
Chain = list[TrainingLine]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "experiments",
        nargs="+",
        metavar="EXP[:GPUS]",
        help="an experiment and its GPUs; 'then' waits until it finished",
    )
    parser.add_argument("--nproc", type=int, metavar="N", help="processes of each (default: one per GPU, else 1)")
    add_set_option(parser, more="; EXP:FILE.KEY=VALUE changes that experiment alone")
    parser.add_argument("--print", action="store_true", help="print the shell lines instead of starting them")
    parser.add_argument_group("-- FLAGS", "flags of the training run, such as --resume (default: --auto)")
    parser.set_defaults(takes_flags=True)


def execute(arguments: argparse.Namespace) -> int:
    arguments.flags = arguments.flags or _DEFAULT_FLAGS
    chains = [[_line(word, arguments) for word in chain] for chain in parse_chains(arguments.experiments)]
    everyone = [line for chain in chains for line in chain]
    check_named_once(everyone)
    _refuse_shared_gpus(chains)
    check_free_to_start(everyone)
    for line in everyone:
        refuse_invalid(line)
    # Experiments of a chain take turns; only one of them is on the machine at a time.
    num_processes = sum(max(line.nproc for line in chain) for chain in chains)
    for chain in chains:
        script = _write_script(chain, num_processes)
        if arguments.print:
            print(script)
            continue
        for line in chain:
            line.make_folders()
        start_in_background(script, [line.paths for line in chain])
    if not arguments.print:
        print(f"watch: {verb_line('status', None, data_home(arguments.data_home), '--watch')}")
    return 0


def parse_chains(words: list[str]) -> list[list[str]]:
    """Return lists that run in parallel; the experiments of a list run one after the other."""
    chains: list[list[str]] = []
    is_next = False
    for word in words:
        if word == THEN:
            if not chains or is_next:
                raise UsageError(f"{THEN!r} must stand between two experiments.")
            is_next = True
        elif is_next:
            chains[-1].append(word)
            is_next = False
        else:
            chains.append([word])
    if is_next:
        raise UsageError(f"{THEN!r} must stand between two experiments.")
    return chains


def _line(word: str, arguments: argparse.Namespace) -> TrainingLine:
    name, _, gpus = word.partition(":")
    paths = ExperimentPaths(data_home(arguments.data_home), name)
    check_known(paths)
    flags = [*set_flags(overrides_of(name, arguments)), *arguments.flags]
    return training_line(paths, nproc=arguments.nproc, gpus=gpus or None, flags=flags, in_background=True)


def overrides_of(experiment: str, arguments: argparse.Namespace) -> list[str]:
    """Return what ``--set`` changes for one of several experiments, or refuse a name that is not among them."""
    names = [word.partition(":")[0] for word in arguments.experiments if word != THEN]
    overrides = []
    for word in arguments.set:
        # A name of an experiment has neither of the two characters.
        owner, colon, override = word.partition(":")
        if not colon or "=" in owner:
            overrides.append(word)
            continue
        if owner not in names:
            raise UsageError(f"--set {word}: {owner!r} is not started here.{nearest(owner, names)}")
        if owner == experiment:
            overrides.append(override)
    return overrides


def _refuse_shared_gpus(chains: list[Chain]) -> None:
    """Refuse GPUs that two chains would use at the same time; within a chain, experiments take turns."""
    gpus = [(chain[0].paths.name, {gpu for line in chain for gpu in line.devices}) for chain in chains]
    for (first, used), (second, wanted) in combinations(gpus, 2):
        if used & wanted:
            shared = ", ".join(map(str, sorted(used & wanted)))
            raise UsageError(f"{first} and {second} must not share GPUs, but both have {shared}.")


def check_named_once(everyone: Chain) -> None:
    names = [line.paths.name for line in everyone]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise UsageError(f"{', '.join(doubled)} must be launched once only.")


def check_free_to_start(everyone: Chain) -> None:
    """Refuse experiments that run or are on their way already."""
    for line in everyone:
        state = state_of(line.paths)
        if state in LIVE:
            raise StateConflict(f"{line.paths.name!r} is {state} already.\n  fix: stop it first, or leave it.")


def _write_script(chain: Chain, num_processes: int) -> str:
    """Return shell lines: each experiment after the first only once the one before has finished."""
    lines = [_write_line(chain[0], num_processes)]
    for before, line in pairwise(chain):
        # A run that was stopped ends with 0, too, so status is asked: its exit code is 0 for finished alone.
        status = [*ENTRY, "status", before.paths.name, "--exit-code"]
        reason = f"{before.paths.name} has not finished, so {line.paths.name} is not started"
        lines.append(
            f"{shlex.join([*status, '--data-home', str(before.paths.home)])} > /dev/null || "
            f"{{ echo {shlex.quote(reason)}; exit 1; }}"
        )
        lines.append(_write_line(line, num_processes))
    return "\n".join(lines)


def _write_line(line: TrainingLine, num_processes: int) -> str:
    # Messages of the run name the verb that starts this one experiment in the background, on the same devices.
    gpus = ["--gpus", ",".join(map(str, line.devices))] if line.devices else []
    launch = shlex.join(["run", "--nproc", str(line.nproc), *gpus, "--detach"])
    return f"{LAUNCH_VARIABLE}={shlex.quote(launch)} {line.to_shell(line.train_words, num_processes)}"
