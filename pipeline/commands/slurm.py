"""Write a batch script for Slurm that trains until it is finished, and submit it if asked to."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from pipeline.arguments import add_set_option, set_flags
from pipeline.command_lines import verb_line
from pipeline.commands.launch import THEN, check_free_to_start, check_named_once, overrides_of, parse_chains
from pipeline.errors import UsageError
from pipeline.launch.refusals import refuse_invalid
from pipeline.launch.slurm_script import Job
from pipeline.launch.torchrun_command import TrainingLine, training_line
from pipeline.lifecycle.mode import check_known
from pipeline.monitoring.launch_record import record_job
from pipeline.paths import ExperimentPaths, data_home
from pipeline.system.files import replace_text
from pipeline.system.slurm_client import check_can_submit, submit

EXAMPLE = """\
examples:
  training-pipeline slurm digits --gpus-per-node 8 --time 4:00:00 --submit
  training-pipeline slurm digits --nodes 2 --time 1-0 --sbatch=--partition=gpu
  training-pipeline slurm stage_1 then stage_2 --time 4:00:00 --submit
  training-pipeline slurm a b c d --at-once 2 --time 2:00:00 --submit"""
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d\d?))?(?::(\d\d?))?")
# Options that the script itself sets or depends on.
_RESERVED_OPTIONS = re.compile(
    r"--(signal|no-requeue|requeue|open-mode|output|nodes|time|array|ntasks\S*|chdir|cpus-per-task|wrap)\b"
    r"|-[NtoanDc]"
)
# The largest time before the limit that Slurm takes for --signal.
_MAX_GRACE_SECONDS = 65535


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "experiments",
        nargs="+",
        metavar="EXP",
        help="one experiment, several as an array, or two and more in turn with 'then' between them",
    )
    add("--time", required=True, metavar="T", help="limit of one job: minutes, H:M:S or D-H:M:S")
    add("--nodes", type=int, default=1, metavar="N", help="nodes of each experiment (default: 1)")
    add("--gpus-per-node", type=int, metavar="G", help="GPUs of each node (default: none)")
    add("--nproc", type=int, metavar="N", help="processes on each node (default: one per GPU, else 1)")
    add("--cpus-per-task", type=int, metavar="C", help="CPUs on each node (default: one per process)")
    add("--grace", type=int, default=120, metavar="SECONDS", help="stop this long before the limit (default: 120)")
    add("--max-requeues", type=int, default=100, metavar="K", help="most continuations in a new job (default: 100)")
    add("--at-once", type=int, metavar="N", help="tasks of an array that may run at once (default: all)")
    add(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="any other option of sbatch, as in the second example; repeatable",
    )
    add(
        "--container-image",
        metavar="IMAGE",
        help="train inside this image (pyxis), with its python3; the data home and this package are mounted",
    )
    add("--setup", type=Path, metavar="FILE", help="shell script to source on the node first, e.g. conda activate")
    add_set_option(parser, more="; EXP:FILE.KEY=VALUE changes that experiment alone")
    add("--print", action="store_true", help="print the script instead of writing it")
    add("--submit", action="store_true", help="submit what was written")
    parser.add_argument_group("-- FLAGS", "flags of the training run, besides --auto which it always has")
    parser.set_defaults(takes_flags=True)


def execute(arguments: argparse.Namespace) -> int:
    _check_options(arguments)
    chains = parse_chains(arguments.experiments)
    if len(chains) > 1 and THEN in arguments.experiments:
        raise UsageError(f"{THEN!r} must stand between all experiments or none.", "call slurm once for each chain")
    if len(chains) > 1:
        # Experiments in parallel are the tasks of one array.
        jobs = [_make_job([name for chain in chains for name in chain], arguments)]
    else:
        jobs = [_make_job([name], arguments) for name in chains[0]]
    lines = [line for job in jobs for line in job.lines]
    check_named_once(lines)
    if arguments.print:
        print("\n".join(job.script() for job in jobs), end="")
        return 0
    if arguments.submit:
        check_can_submit()
        check_free_to_start(lines)
        for line in lines:
            refuse_invalid(line)
    for job in jobs:
        for line in job.lines:
            line.make_folders()
        replace_text(job.paths.batch_script, job.script())
        print(f"wrote {job.paths.batch_script}")
    if arguments.submit:
        _submit(jobs)
    return 0


def _make_job(names: list[str], arguments: argparse.Namespace) -> Job:
    """Return a job for one experiment, or an array with a task for each of several."""
    lines: list[TrainingLine] = []
    for name in names:
        paths = ExperimentPaths(data_home(arguments.data_home), name)
        check_known(paths)
        if {"--resume", "--reset"} & {*arguments.flags}:
            raise UsageError("A job that is requeued must continue where it was: its run always has --auto.")
        overrides = set_flags(overrides_of(name, arguments))
        flags = ["--auto", *overrides, *(flag for flag in arguments.flags if flag != "--auto")]
        nproc = arguments.nproc if arguments.nproc is not None else arguments.gpus_per_node or 1
        lines.append(training_line(paths, nproc=nproc, flags=flags, in_background=True, num_nodes=arguments.nodes))
    return Job(
        tuple(lines),
        time=arguments.time,
        seconds=_seconds(arguments.time),
        grace=arguments.grace,
        max_requeues=arguments.max_requeues,
        cpus_per_task=arguments.cpus_per_task or lines[0].nproc,
        gpus_per_node=arguments.gpus_per_node,
        at_once=arguments.at_once,
        more=tuple(arguments.sbatch),
        setup=arguments.setup and arguments.setup.absolute(),
        container_image=arguments.container_image,
    )


def _check_options(arguments: argparse.Namespace) -> None:
    minimum = {"nodes": 1, "gpus_per_node": 1, "cpus_per_task": 1, "at_once": 1, "max_requeues": 0, "grace": 1}
    for name, limit in minimum.items():
        value = getattr(arguments, name)
        if value is not None and value < limit:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {limit}, but is {value}.")
    if not arguments.grace < min(_seconds(arguments.time), _MAX_GRACE_SECONDS):
        raise UsageError(
            f"--grace must be shorter than --time, but is {arguments.grace} s of {_seconds(arguments.time)} s.",
            "--grace 30, or a longer --time",
        )
    if arguments.setup is not None and not arguments.setup.is_file():
        raise UsageError(f"--setup must be a shell script, but {arguments.setup} is not a file.")
    for option in arguments.sbatch:
        if not option.startswith("-") or not option.isprintable():
            raise UsageError(f"--sbatch must name an option of sbatch, but is {option!r}.", "--sbatch=--partition=gpu")
        if _RESERVED_OPTIONS.match(option):
            raise UsageError(f"--sbatch={option} would change what the script depends on.", "see slurm --help")


def _seconds(text: str) -> int:
    """Return how long a time limit in Slurm's notation is."""
    match = _TIME.fullmatch(text)
    days, *parts = match.groups() if match else (None,)
    given = [int(part) for part in parts if part is not None]
    # Without days, one number is minutes and two are minutes and seconds.
    units = (3600, 60, 1) if days is not None or len(given) == 3 else (60, 1)
    total = int(days or 0) * 86400 + sum(number * unit for number, unit in zip(given, units, strict=False))
    if not total:
        raise UsageError(f"--time must be minutes, H:M:S or D-H:M:S, but is {text!r}.", "--time 4:00:00")
    return total


def _submit(jobs: list[Job]) -> None:
    """Submit jobs, each after the one before it, and record them with their experiments."""
    numbers: list[str] = []
    for before, job in zip([None, *jobs], jobs, strict=False):
        # Without the second option, a job whose predecessor failed would stay in the queue for ever.
        after = [f"--dependency=afterok:{numbers[-1]}", "--kill-on-invalid-dep=yes"] if before else []
        number = submit(job.paths.batch_script, *after)
        name_before = before.paths.name if before else None
        for task, line in enumerate(job.lines):
            record_job(line.paths, f"{number}_{task}" if job.is_array else number, name_before)
        print(f"{', '.join(line.paths.name for line in job.lines)}: submitted as job {number}")
        numbers.append(number)
    print(f"  watch:  {verb_line('status', jobs[0].paths.name, jobs[0].paths.home)}")
    print(f"  cancel: scancel {' '.join(numbers)}")
