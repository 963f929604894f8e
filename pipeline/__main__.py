"""``python -m pipeline VERB``: helpers around a training run."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from typing import Any

from pipeline.arguments import RankZeroParser
from pipeline.errors import PipelineError
from pipeline.paths import DATA_HOME_VARIABLE

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
    words, flags = _parted(sys.argv[1:] if words is None else words)
    parser = RankZeroParser(prog="python -m pipeline", description=__doc__, allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, summary in _VERBS.items():
        own = verbs.add_parser(
            name, help=summary, description=summary, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        # Only the verb that runs is imported: some need torch, which takes seconds.
        if name in words[:1]:
            own.epilog = _module(name).EXAMPLE
            _module(name).add_arguments(own)
            own.add_argument(
                "--data-home", metavar="DIR", help=f"default: ${DATA_HOME_VARIABLE}, else the current folder"
            )
    arguments = parser.parse_args(words, argparse.Namespace(flags=flags, takes_flags=False))
    if flags and not arguments.takes_flags:
        parser.error(f"{arguments.verb} takes no flags of a training run behind '--'")
    try:
        return int(_module(arguments.verb).execute(arguments))
    except PipelineError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except (BrokenPipeError, KeyboardInterrupt):
        # The reader of a pipe has closed it; what is still buffered must not be tried again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 130


def _parted(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the words of the verb, and behind ``--`` the flags of a training run."""
    place = words.index("--") if "--" in words else len(words)
    return words[:place], words[place + 1 :]


def _module(verb: str) -> Any:
    return import_module(f"pipeline.commands.{verb.replace('-', '_')}")


if __name__ == "__main__":
    sys.exit(main())
