"""``python -m pipeline VERB``: helpers around a training run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Protocol, cast

from pipeline.arguments import RankZeroParser
from pipeline.errors import PipelineError
from pipeline.paths import DATA_HOME_VARIABLE


class _Verb(Protocol):
    """What every file of ``commands/`` defines."""

    EXAMPLE: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    execute: Callable[[argparse.Namespace], int]


# By name. Each is a file of ``commands/``, with "_" for "-".
_VERBS = {
    "new": "Write a settings folder that trains as it is.",
    "check": "Find everything that can be known to be wrong before training; writes nothing.",
    "run": "Check an experiment, then run it under torchrun with the right options.",
    "launch": "Start experiments in the background, side by side or one after the other.",
    "slurm": "Write or submit a batch script for Slurm that continues until it is finished.",
    "status": "Show how far experiments have come, without touching them.",
    "logs": "Show or follow the log of an experiment.",
    "stop": "Ask a run to finish its step or epoch, commit and end.",
    "compare": "Show best and last values of experiments and the settings in which they differ.",
    "clean": "Show what could be freed, and free it if asked to; never what a resume needs.",
    "report": "Write one HTML page about one or several experiments, at any time.",
    "fsck": "Verify every digest of an experiment's results and say what to do about damage.",
    "verify-resume": "Prove on your own experiment that a killed and resumed run gives the same bits.",
    "evaluate": "Evaluate a split with committed weights, exactly, alone or under torchrun.",
    "export": "Put modules of experiments and of foreign files into one file of weights.",
    "replay": "Rebuild one past step exactly: its items, losses and gradient norms.",
}


def main(words: list[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    words = sys.argv[1:] if words is None else words
    # Behind "--" are flags of a training run, which the verb's own parser must not see.
    split = words.index("--") if "--" in words else len(words)
    flags = words[split + 1 :]
    words = words[:split]
    parser = RankZeroParser(prog="python -m pipeline", description=__doc__, allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, summary in _VERBS.items():
        verb_parser = verbs.add_parser(
            name, help=summary, description=summary, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        # Only the verb that runs is imported: some need torch, which takes seconds.
        if name in words[:1]:
            verb_parser.epilog = _import_verb(name).EXAMPLE
            _import_verb(name).add_arguments(verb_parser)
            verb_parser.add_argument(
                "--data-home", metavar="DIR", help=f"default: ${DATA_HOME_VARIABLE}, else the current folder"
            )
    arguments = parser.parse_args(words, argparse.Namespace(flags=flags, takes_flags=False))
    if flags and not arguments.takes_flags:
        parser.error(f"{arguments.verb} takes no flags of a training run behind '--'")
    try:
        return _import_verb(arguments.verb).execute(arguments)
    except PipelineError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except (BrokenPipeError, KeyboardInterrupt):
        # The reader of a pipe has closed it; what is still buffered must not be tried again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 130


def _import_verb(verb: str) -> _Verb:
    return cast(_Verb, import_module(f"pipeline.commands.{verb.replace('-', '_')}"))


if __name__ == "__main__":
    sys.exit(main())
