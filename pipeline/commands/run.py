"""Check an experiment, then run it under torchrun with the right options."""

from __future__ import annotations

import argparse
import os
import shlex

from pipeline.arguments import add_set_option, parse_arguments, set_flags
from pipeline.command_lines import LAUNCH_VARIABLE
from pipeline.commands.check import check_before_run
from pipeline.launch.torchrun_command import start_in_background, training_line
from pipeline.paths import ExperimentPaths, data_home

EXAMPLE = """\
examples:
  python -m pipeline run digits --nproc 2 --set parameters.lr=1e-3
  python -m pipeline run digits --gpus 0-3 --detach -- --resume
  python -m pipeline run digits --nproc 2 --print"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", metavar="EXP")
    parser.add_argument("--nproc", type=int, metavar="N", help="number of processes (default: one per GPU, else 1)")
    parser.add_argument("--gpus", metavar="GPUS", help="which GPUs, as nvidia-smi numbers them: 0-3 or 0,2")
    add_set_option(parser)
    parser.add_argument("--detach", action="store_true", help="start it in the background and return")
    parser.add_argument("--print", action="store_true", help="print the line instead of running it")
    parser.add_argument_group("-- FLAGS", "flags of the training run, such as --resume")
    parser.set_defaults(takes_flags=True)


def execute(arguments: argparse.Namespace) -> int:
    paths = ExperimentPaths(data_home(arguments.data_home), arguments.experiment)
    flags = [*set_flags(arguments.set), *arguments.flags]
    line = training_line(paths, nproc=arguments.nproc, gpus=arguments.gpus, flags=flags, in_background=arguments.detach)
    if arguments.print:
        print(line.to_shell(line.nproc))
        return 0
    if not check_before_run(parse_arguments([paths.name, "--data-home", str(paths.home), *flags])):
        return 0
    line.make_folders()
    # Messages of the run then name this verb, and not the torchrun line that it made.
    own_options = {"--nproc": arguments.nproc, "--gpus": arguments.gpus}
    given = [word for option, value in own_options.items() if value is not None for word in (option, str(value))]
    detach = ["--detach"] if arguments.detach else []
    launched_by = {LAUNCH_VARIABLE: shlex.join(["run", *given, *detach])}
    if not arguments.detach:
        # Replaces this process: signals and the exit code are those of torchrun itself.
        os.execvpe(line.words[0], line.words, {**os.environ, **line.variables(line.nproc), **launched_by})
    start_in_background(line.to_shell(line.nproc), [paths], launched_by)
    return 0
