"""Check an experiment, then train it, here or in the background."""

from __future__ import annotations

import argparse
import os
import signal

from pipeline.arguments import add_set_option, parse_arguments, set_flags
from pipeline.command_lines import launched_by
from pipeline.launch.torchrun_command import (
    add_process_options,
    given_process_options,
    start_in_background,
    training_line,
)
from pipeline.paths import ExperimentPaths, data_home
from pipeline.system.stop_requests import report_early_interrupt

EXAMPLE = """\
examples:
  training-pipeline run digits --nproc 2 --set parameters.lr=1e-3
  training-pipeline run digits --gpus 0-3 --detach -- --resume
  training-pipeline run digits --nproc 2 --print"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", metavar="EXP")
    add_process_options(parser)
    add_set_option(parser)
    parser.add_argument("--detach", action="store_true", help="start it in the background and return")
    parser.add_argument(
        "--print", action="store_true", help="print the torchrun line that does the same, instead of running it"
    )
    parser.add_argument_group("-- FLAGS", "flags of the training run, such as --resume")
    parser.set_defaults(takes_flags=True)


def execute(arguments: argparse.Namespace) -> int:
    paths = ExperimentPaths(data_home(arguments.data_home), arguments.experiment)
    flags = [*set_flags(arguments.set), *arguments.flags]
    line = training_line(paths, nproc=arguments.nproc, gpus=arguments.gpus, flags=flags, in_background=arguments.detach)
    if arguments.print:
        print(line.to_shell(line.torchrun_words, line.nproc))
        return 0
    detach = ["--detach"] if arguments.detach else []
    with launched_by("run", [*given_process_options(arguments), *detach]):
        try:
            # Imported late: torch takes seconds.
            from pipeline.commands.check import check_before_run

            if not check_before_run(parse_arguments([paths.name, "--data-home", str(paths.home), *flags])):
                return 0
        except KeyboardInterrupt:
            return report_early_interrupt(signal.SIGINT)
        line.make_folders()
        if not arguments.detach:
            # Until the new program collects stop signals, Ctrl+C waits: there it would be a traceback out of an import.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            # Replaces this process: what was loaded for the checks need not stay in memory.
            os.execve(line.train_words[0], line.train_words, {**os.environ, **line.variables(line.nproc)})
        start_in_background(line.to_shell(line.train_words, line.nproc), [line.paths])
    return 0
