"""Evaluate a split with committed weights, exactly, alone or under torchrun."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from pipeline.arguments import DEVICE_HELP
from pipeline.command_lines import has_launcher
from pipeline.distributed.processes import Processes
from pipeline.errors import UsageError
from pipeline.evaluation.evaluate import SPLITS, Request, compute_metrics, evaluate
from pipeline.evaluation.result import SHARD_SUFFIXES, SUFFIXES, Outcome, lines, merge, read_shard
from pipeline.paths import ExperimentPaths, data_home
from pipeline.system.files import check_output, write_output
from pipeline.system.formatting import as_json, shown_bytes
from pipeline.system.logging import start_console
from pipeline.system.stop_requests import end_with_launcher
from pipeline.training.predictions import join_predictions
from pipeline.worker import exit_now, run_in_group

EXAMPLE = """\
examples:
  training-pipeline evaluate digits --split test
  torchrun --nproc-per-node=2 -m training_pipeline evaluate digits --out a.json
  training-pipeline evaluate digits --shard 0/2 --out shard_0.npz
  training-pipeline evaluate --merge shard_0.npz shard_1.npz --out all.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", nargs="?", metavar="EXP", help="an experiment with results; it may be running")
    parser.add_argument("--pool", default="best", help="the weights to evaluate: best, last, init, epoch_N")
    parser.add_argument("--average", metavar="NAME", help="let this average stand in for its source")
    parser.add_argument("--split", choices=SPLITS, default="val", help="the points to evaluate (default: val)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write values and predictions: .json, .npz or .pt")
    parser.add_argument("--no-predictions", action="store_true", help="leave predictions out of the file")
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")
    parser.add_argument("--shard", type=_parse_shard, metavar="I/N", help="evaluate one of N shards, counted from 0")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="put the files of all shards together")
    parser.add_argument("--device", metavar="DEVICE", help=DEVICE_HELP)
    parser.add_argument("--json", action="store_true", help="print the values as JSON")
    parser.add_argument(
        "--accept-edited-copy", action="store_true", help="evaluate although the frozen copy was edited"
    )


def _parse_shard(word: str) -> tuple[int, int]:
    index, _, count = word.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"must be I/N with I from 0 to N - 1, but is {word!r} instead")
    return int(index), int(count)


def execute(arguments: argparse.Namespace) -> int:
    if has_launcher():
        end_with_launcher()
    code = run_in_group(partial(_evaluate_or_merge, arguments), wanted_device=arguments.device)
    if has_launcher():
        # Threads of the process group could turn an orderly exit into another code.
        exit_now(code)
    return code


def _evaluate_or_merge(arguments: argparse.Namespace, processes: Processes) -> None:
    processes.on_rank_zero(_check_options, arguments)
    if arguments.merge:

        def merge_shards() -> None:
            merged = merge([read_shard(file) for file in arguments.merge])
            paths = ExperimentPaths(data_home(arguments.data_home), merged.facts["experiment"])
            _conclude(compute_metrics(paths, merged), arguments)

        processes.on_rank_zero(merge_shards)
        return
    # A name that is not safe is refused on all ranks alike.
    paths = processes.on_all_ranks(ExperimentPaths, data_home(arguments.data_home), arguments.experiment)
    start_console(paths.name, is_rank_zero=processes.is_rank_zero, stream=sys.stderr)
    request = Request(
        pool=arguments.pool,
        split=arguments.split,
        shard=arguments.shard or (0, 1),
        average=arguments.average,
        # Predictions go into a file only.
        predicts=arguments.out is not None and not arguments.no_predictions,
        accepts_edited_copy=arguments.accept_edited_copy,
    )
    outcome, predicted = evaluate(paths, processes, request)

    def join_and_conclude() -> None:
        _conclude(replace(outcome, predictions=join_predictions(predicted)), arguments)

    # Predictions may be large: rank zero alone puts them together.
    processes.on_rank_zero(join_and_conclude)


def _check_options(arguments: argparse.Namespace) -> None:
    """Refuse options that contradict each other, and a file that could not be written, before any work."""
    if bool(arguments.merge) == bool(arguments.experiment):
        raise UsageError(
            "Say which experiment to evaluate, or which files to --merge.", EXAMPLE.splitlines()[1].strip()
        )
    if arguments.merge and arguments.shard:
        raise UsageError("--merge puts all shards together; it cannot make one with --shard.")
    if arguments.shard and not arguments.out:
        raise UsageError("--shard needs --out FILE.npz, from which all shards are merged.")
    if arguments.out:
        check_output(arguments.out, SHARD_SUFFIXES if arguments.shard else SUFFIXES, may_replace=arguments.force)


def _conclude(outcome: Outcome, arguments: argparse.Namespace) -> None:
    """Print the values and write the file; one shard alone has no values to print."""
    is_shard = arguments.shard is not None
    if arguments.json:
        shown = {**outcome.summary(), "shard": list(outcome.shard), "values": None} if is_shard else outcome.summary()
        print(json.dumps(as_json(shown), indent=1))
    elif not is_shard:
        print("\n".join(lines(outcome)))
    if arguments.out:
        writer = outcome.shard_writer() if is_shard else outcome.writer(arguments.out.suffix)
        size = write_output(arguments.out, writer)
        part = f"shard {outcome.shard[0]} of {outcome.shard[1]}, " if is_shard else ""
        # Standard output holds nothing but JSON where that was asked for.
        print(f"wrote {arguments.out} ({part}{shown_bytes(size)})", file=sys.stderr if arguments.json else sys.stdout)
