"""Train an experiment on one or several processes; kill it anywhere, run it again."""

from __future__ import annotations

import argparse
import os

from pipeline.arguments import Arguments, add_training_options, read_arguments
from pipeline.command_lines import has_launcher, launched_by
from pipeline.launch.torchrun_command import TrainingLine, add_process_options, given_process_options, training_line
from pipeline.paths import ExperimentPaths, data_home
from pipeline.system.stop_requests import report_early_interrupt, stop_signals_collected

EXAMPLE = """\
examples:
  training-pipeline train digits
  training-pipeline train digits --nproc 4 --resume
  training-pipeline train digits --nproc 2 --set parameters.lr=1e-3"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_training_options(parser)
    add_process_options(parser)
    parser.add_argument("--output-to-files", action="store_true", help="keep the output of rank 0 in a file, too")


def execute(arguments: argparse.Namespace) -> int:
    asked = read_arguments(arguments)
    if has_launcher():
        from pipeline.worker import run_worker

        return run_worker(asked)
    line = training_line(
        ExperimentPaths(data_home(arguments.data_home), asked.experiment),
        nproc=arguments.nproc,
        gpus=arguments.gpus,
        flags=asked.flags,
        in_background=arguments.output_to_files,
    )
    os.environ |= line.variables(line.nproc)
    options = [*given_process_options(arguments), *(["--output-to-files"] if arguments.output_to_files else [])]
    with launched_by("train", options):
        return _train(asked, line)


def _train(asked: Arguments, line: TrainingLine) -> int:
    """Train in processes of their own, or a single one in this process; return the exit code."""
    # Before torch is imported: that takes seconds, in which Ctrl+C may be pressed.
    with stop_signals_collected() as received:
        if line.nproc > 1:
            line.make_folders()
            from pipeline.launch.hosted_agent import host_training

            return host_training(line, received)
        from pipeline.worker import run_worker
    return report_early_interrupt(received[0]) if received else run_worker(asked)
